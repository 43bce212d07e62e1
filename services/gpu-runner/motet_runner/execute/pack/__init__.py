"""The weights of linears, packed in the kernels' layout. Which kernels serve is chosen elsewhere."""
