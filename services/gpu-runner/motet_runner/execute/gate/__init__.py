"""The gate: kernels that replace a model's modules must be as near to the truth as the modules are. It only judges;
others choose."""
