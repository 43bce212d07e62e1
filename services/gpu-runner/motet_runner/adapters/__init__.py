"""Adapters on their way to the device: fetched, checked, certified, loaded into slots. A failed one fails only its own.

`peft_config`, `header` and `check` need no torch: the service runs them outside the engine.
"""
