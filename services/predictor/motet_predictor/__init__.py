"""How long an answer will be, as quantiles; learned from how long answers were.

Knows lengths, tenants and adapters. Never sees text: prompts arrive as hashed features and counts.
"""
