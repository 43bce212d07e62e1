"""From logits to tokens, whatever computes the logits or uses the tokens."""
