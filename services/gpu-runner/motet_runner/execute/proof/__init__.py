"""Proves adapters where they lie in the engine's memory."""
