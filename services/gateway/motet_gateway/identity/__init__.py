"""Finds the caller of a request: API keys, and what each may see and do."""
