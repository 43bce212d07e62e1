"""Adapters: their revisions, who checks and serves which, and where their bytes are. Pure."""
