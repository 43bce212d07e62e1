"""Records what modules compute for a row as steps of a program, which `motet_kernels.cpp` runs. It neither fuses steps
nor packs weights."""
