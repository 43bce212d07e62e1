"""Which kernels serve: chosen by name, by test and by availability, and changed while no sequence lives. The kernels
themselves are in `motet_kernels`."""
