"""From logits to tokens. It does not know what computes the logits or uses the tokens."""
