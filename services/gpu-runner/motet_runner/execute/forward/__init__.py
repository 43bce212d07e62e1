"""The forward passes of a model, all with one protocol: its own modules, a recorded program, the kernels of a GPU. Each
computes a batch's logits; which one serves is decided elsewhere."""
