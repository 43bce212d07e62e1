"""Measures the best number of threads and the best type of numbers on this machine, and keeps both for the next
start."""
