"""`benchmarks.lora_op` compares its baselines with add_lora before it measures."""

import pytest
import torch

from benchmarks.lora_op import check_same


def test_a_way_that_differs_ends_the_benchmark() -> None:
    y = torch.zeros(2)
    check_same({"one": lambda: y.add_(1.0), "another": lambda: y.add_(1.01)}, y)
    with pytest.raises(SystemExit, match=r"another differs from one by 0\.1"):
        check_same({"one": lambda: y.add_(1.0), "another": lambda: y.add_(1.1)}, y)
