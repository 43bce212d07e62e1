"""Adapters on the device: copied into their runs part by part, and added to the linears' results. Files, checks and
host memory belong to `motet_runner.adapters`."""
