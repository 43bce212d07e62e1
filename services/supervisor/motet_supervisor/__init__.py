"""Decides what happens when a request outgrows its promise, and finds runners that hang.

`policy/` decides (extend, or park by swap or by recompute; hung or only slow) and is pure; `service.py` sends the
decisions to runners and to the leading scheduler."""
