"""The operator on a cluster: the same `reconcile`, with the API server's objects as its view and Deployments as its
hands.

`watch` and `resync` fill `cache`; `decide` makes of it everything that should be written; `writer` writes it.
"""
