"""Estimates how long an answer will be, as quantiles, from the lengths of earlier answers.

It knows lengths, tenants and adapters, never text: prompts arrive as hashed features and counts.
"""
