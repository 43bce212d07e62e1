"""Where the tests of this folder compute, and in what."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
"""In the interpreter a product of bfloats is wrong, without an error."""
