"""The weights of linears, packed as kernels read them. Which kernels serve is chosen elsewhere."""
