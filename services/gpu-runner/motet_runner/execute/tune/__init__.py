"""Measures on this machine, and keeps for its next start: the number of threads, and the type of numbers."""
