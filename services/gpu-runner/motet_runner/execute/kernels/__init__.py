"""Which kernels serve: chosen by name, by test and by what is there, and changed while no sequence lives."""
