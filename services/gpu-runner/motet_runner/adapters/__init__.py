"""Adapters are fetched, checked, certified, and loaded into slots. An adapter that fails affects only its own requests.

The checks need no torch: the service runs them outside the engine.
"""
