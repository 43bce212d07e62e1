"""Tests of what computes on a GPU. With a CUDA device they run there. Elsewhere Triton's interpreter runs them, in a
process of its own (`tests/kernels/test_interpreter.py`): Triton decides when it is imported, and torch imports it.
"""

import os

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
