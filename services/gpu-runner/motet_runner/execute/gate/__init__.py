"""The gate: kernels that replace a model's modules must be as near to the truth as the modules are. The gate judges
kernels and does not choose them."""
