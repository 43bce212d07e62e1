"""The ways through a model, all with one protocol: its own modules, a recorded program, the kernels of a GPU. Each
computes logits of a batch; which one serves is decided elsewhere."""
