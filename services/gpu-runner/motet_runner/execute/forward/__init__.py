"""The forward passes of a model, all with one protocol: its own modules, a recorded program, the kernels of a GPU. Each
pass computes a batch's logits. `kernels` decides which pass serves."""
