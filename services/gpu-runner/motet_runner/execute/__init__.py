"""One iteration on the device: the model, its attention, its adapters' rows, the sampler."""
