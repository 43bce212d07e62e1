"""What to do when a request outgrows its promise, and when a runner stops moving.

`policy/` decides (extend, or park by swap or by recompute; hung or merely slow) and is pure; `service.py` carries it to
runners and to the leading scheduler.
"""
