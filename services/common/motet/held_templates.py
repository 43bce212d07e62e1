"""How many adapters a gateway names whose chat template no runner has: what both sides of the message keep to."""

MAX_HELD_TEMPLATES = 1024
MAX_OF_NAMESPACE = 64
"""Of one namespace: the sources of its adapters may be gone for ever."""
