"""The device on which tests of engines, back ends and samplers compute, where they do not test what is a CPU's own."""

import os

import torch

DEVICE = torch.device(os.environ.get("MOTET_RUNNER_DEVICE") or "cpu")
"""`MOTET_RUNNER_DEVICE=cuda pytest …` runs the same tests on a GPU."""
