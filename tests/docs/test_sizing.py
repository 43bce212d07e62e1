"""The figures of the guide's section on sizing follow from the code that takes the memory."""

import re

import pytest

from motet.domain import PAGE_TOKENS, KVShape
from motet_runner.settings import Settings
from tests.docs.pages import DOCS, rows

PAGE = DOCS / "guides" / "platform.md"
SECTION = re.split(r"^## ", PAGE.read_text().split("\n## Sizing a pool\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
EXAMPLE = {what: example for what, _, example in rows(PAGE, "Sizing a pool")}
MIB = 1024 * 1024
HIDDEN, INNER, LAYERS = 4096, 14336, 32
SHAPE = KVShape(layers=LAYERS, kv_heads=8, head_dim=128, dtype_bytes=2)
KEYS = SHAPE.kv_heads * SHAPE.head_dim
ATTENTION = [(HIDDEN, HIDDEN), (HIDDEN, KEYS), (HIDDEN, KEYS), (HIDDEN, HIDDEN)]
ALL = [*ATTENTION, (HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]


def test_pages_and_sequences_take_the_memory_of_the_page() -> None:
    page = SHAPE.bytes_per_page()
    assert EXAMPLE[f"a page, the keys and values of {PAGE_TOKENS} tokens"] == f"{page // MIB} MiB"
    assert EXAMPLE["a sequence"] == f"{8192 // PAGE_TOKENS * page // MIB // 1024} GiB for 8192 tokens"


def run_mib(rank: int) -> int:
    """One adapter on a device."""
    import torch

    from motet_kernels import LinearGroup, TorchBackend

    groups = [LinearGroup(inputs, {str(number): outputs}) for number, (inputs, outputs) in enumerate(ALL)]
    backend = TorchBackend(groups, torch.empty(0, dtype=torch.uint8), torch.bfloat16, copy_bytes=0)
    return backend.layout(rank).bytes * LAYERS // MIB


def test_adapters_take_the_memory_of_the_page() -> None:
    from motet_runner.execute.memory_budget.page_budget import RANK_RESERVED

    said = EXAMPLE["an adapter in device memory"]
    assert said == f"{run_mib(RANK_RESERVED)} MiB at rank {RANK_RESERVED}, {run_mib(64)} MiB at rank 64"
    to_compute_with = Settings.model_fields["max_resident_adapters"].default * run_mib(RANK_RESERVED)
    assert f"that is {to_compute_with / 1024} GiB." in SECTION
    page = SHAPE.bytes_per_page() // MIB
    pages = f"{run_mib(RANK_RESERVED) // page} at rank {RANK_RESERVED} and {run_mib(64) // page} at rank 64"
    assert f"in the example {pages}," in SECTION
    assert run_mib(57) == run_mib(64) > run_mib(56), "ranks are rounded up"
    assert "The rank is rounded up to a multiple of 8." in SECTION


@pytest.mark.parametrize(
    "field", ["max_lora_rank", "max_resident_adapters", "max_cached_adapters", "memory_utilization_percent"]
)
def test_the_page_has_the_runners_defaults(field: str) -> None:
    head, *rest = field.split("_")
    said = re.findall(rf"`engine\.{head}{''.join(map(str.capitalize, rest))}`\s\((\d+)\)", SECTION)
    assert said == [str(Settings.model_fields[field].default)]
