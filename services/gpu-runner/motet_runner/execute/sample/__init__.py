"""From logits to tokens. What computes the logits, and what becomes of the tokens, is not known here."""
