"""The worker of a device that computes by itself, such as a GPU: the host launches an iteration and does not wait.

Rows, their newest tokens and what the sampler counts stay on the device (OR-12). A token that was sampled is the input
of the next iteration without a visit to the host; it travels there beside the computation, for the plan.
"""
