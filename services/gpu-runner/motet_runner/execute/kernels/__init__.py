"""Chooses the kernels that serve, by name, test and availability. The kernels themselves are in `motet_kernels`."""
