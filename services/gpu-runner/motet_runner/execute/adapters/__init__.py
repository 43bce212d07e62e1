"""Adapters on the device: copied into their runs part by part, and added beside the linears of a model. Files, checks
and host memory are those of `motet_runner.adapters`."""
