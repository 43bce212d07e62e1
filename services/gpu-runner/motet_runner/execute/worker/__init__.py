"""Carries plans out, one iteration after the other: on a CPU to the end of each, on a device without waiting for it."""
