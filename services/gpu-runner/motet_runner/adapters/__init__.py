"""Adapters are fetched, checked, certified, and read. An adapter that fails affects only its own requests.

The checks need no torch: the service runs them outside the engine.
"""
