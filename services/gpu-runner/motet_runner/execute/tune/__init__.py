"""Measures on this machine, and keeps for its next start: the number of threads, and the type of numbers. Which kernels
are measured is chosen elsewhere."""
