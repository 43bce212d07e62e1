"""The baselines of `benchmarks.lora_op` compute what add_lora computes."""

import pytest
import torch

from benchmarks.lora_baselines import Baseline, Case, Product
from benchmarks.lora_op import BASELINES, check_same

CASE = Case(owners=[0, 0, 0, 1, 2, 2], ranks=[8, 8, 8])
INPUTS, OUTPUTS, SETS = 16, 24, 3


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES)
def test_each_call_adds_the_product_with_the_next_set_of_adapters(baseline: Baseline) -> None:
    generator = torch.Generator().manual_seed(0)
    random = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    sets = [[(random(8, INPUTS), random(8, OUTPUTS)) for _ in CASE.ranks] for _ in range(SETS)]
    x, y = random(len(CASE.owners), INPUTS), random(len(CASE.owners), OUTPUTS)
    with torch.inference_mode():
        do = baseline(Product(CASE, x, y, sets))
        for turn in range(SETS + 1):
            before = y.clone()
            do()
            of_set = sets[turn % SETS]
            product = [row @ of_set[owner][0].t() @ of_set[owner][1] for row, owner in zip(x, CASE.owners, strict=True)]
            torch.testing.assert_close(y, before + torch.stack(product), rtol=1e-4, atol=1e-4)


def test_a_way_that_differs_ends_the_benchmark() -> None:
    y = torch.zeros(2)
    check_same({"one": lambda: y.add_(1.0), "another": lambda: y.add_(1.01)}, y)
    with pytest.raises(SystemExit, match=r"another differs from one by 0\.1"):
        check_same({"one": lambda: y.add_(1.0), "another": lambda: y.add_(1.1)}, y)
