"""The cases of `benchmarks.prediction`."""
