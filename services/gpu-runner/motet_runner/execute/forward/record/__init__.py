"""Records what modules compute for a row as steps of a program, which `motet_kernels.cpp` runs."""
