"""What modules compute for a row, recorded as steps of a program. How steps run is known in `motet_kernels.cpp`."""
