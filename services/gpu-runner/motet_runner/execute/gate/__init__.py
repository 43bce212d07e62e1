"""The gate: what computes in place of a model's modules must be as near to the truth as they are. It judges, and
chooses nothing."""
