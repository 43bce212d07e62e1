"""Records what modules compute for a row, as steps of a program that `motet_kernels.cpp` runs. Fusing steps and packing
weights are done elsewhere."""
