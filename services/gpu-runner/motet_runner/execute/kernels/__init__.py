"""Which kernels serve: chosen by name, by test and by availability, and changed while no sequence lives."""
