"""The operator on a cluster: the same `reconcile`; its input are the API server's objects, its output are Deployments.

`watch` and `resync` fill `cache`, `decision` decides what should be written, `write_executor` writes it.
"""
