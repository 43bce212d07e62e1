"""Exact mode: the bits of a request's logits do not depend on other requests."""
