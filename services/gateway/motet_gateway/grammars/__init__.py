"""Structured output: how clients ask for it, and the trial of each grammar."""
