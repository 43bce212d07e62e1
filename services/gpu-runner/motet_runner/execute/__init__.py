"""One iteration on the device: the model, attention, LoRA rows, the sampler."""
