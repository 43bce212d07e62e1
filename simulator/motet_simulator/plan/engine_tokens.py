"""The tokens of simulated answers."""

VOCABULARY = 1 << 31

EOS = VOCABULARY
"""Ends an answer. No other token is equal to it."""
