"""Carries plans out, one iteration after the other: synchronously on a CPU, asynchronously on a device."""
