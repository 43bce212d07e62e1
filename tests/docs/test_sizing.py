"""The figures of the guide's section on sizing follow from the code that takes the memory."""

import re

import pytest

from motet.domain import PAGE_TOKENS, KVShape
from motet_kernels import RANKS, LoraWeights, rank_class_of
from motet_runner.settings import Settings
from tests.docs.pages import DOCS, rows

PAGE = DOCS / "guides" / "platform.md"
SECTION = re.split(r"^## ", PAGE.read_text().split("\n## Sizing a pool\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
EXAMPLE = {what: example for what, _, example in rows(PAGE, "Sizing a pool")}
MIB = 1024 * 1024
HIDDEN, INNER, LAYERS = 4096, 14336, 32
SHAPE = KVShape(layers=LAYERS, kv_heads=8, head_dim=128, dtype_bytes=2)
KEYS = SHAPE.kv_heads * SHAPE.head_dim
QUERIES_AND_VALUES = [(HIDDEN, HIDDEN), (HIDDEN, KEYS)]
ALL = [*QUERIES_AND_VALUES, (HIDDEN, KEYS), (HIDDEN, HIDDEN), (HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]


def test_pages_and_sequences_take_the_memory_of_the_page() -> None:
    page = SHAPE.bytes_per_page()
    assert EXAMPLE[f"a page, the keys and values of {PAGE_TOKENS} tokens"] == f"{page // MIB} MiB"
    assert EXAMPLE["a sequence"] == f"{8192 // PAGE_TOKENS * page // MIB // 1024} GiB for 8192 tokens"


def slots(projections: list[tuple[int, int]], rank: int) -> int:
    """Bytes of one adapter on a device, in MiB."""
    import torch

    taken = 0
    for inputs, outputs in projections:
        of_its_class = LoraWeights(inputs, outputs, 2 * RANKS[-1], torch.bfloat16, "meta").stacks[rank_class_of(rank)]
        taken += of_its_class.a[0].nbytes + of_its_class.b[0].nbytes
    return taken * LAYERS // MIB


def test_adapters_take_the_memory_of_the_page() -> None:
    from motet_runner.engine import RANK_RESERVED

    said = EXAMPLE["an adapter in device memory"]
    assert f"{slots(ALL, 64)} MiB for all seven projections" in said
    assert f"{slots(QUERIES_AND_VALUES, 64)} MiB for queries and values" in said
    reserved = 2 * Settings.model_fields["max_resident_adapters"].default * slots(ALL, RANK_RESERVED)
    assert f"{reserved / 1024} GiB for all seven projections" in SECTION
    assert slots(ALL, 33) == slots(ALL, 64), "ranks are rounded up"
    assert f"{', '.join(map(str, RANKS[:-1]))} and {RANKS[-1]}." in SECTION


@pytest.mark.parametrize(
    "field", ["max_lora_rank", "max_resident_adapters", "max_cached_adapters", "memory_utilization_percent"]
)
def test_the_page_has_the_runners_defaults(field: str) -> None:
    head, *rest = field.split("_")
    said = re.findall(rf"`engine\.{head}{''.join(map(str.capitalize, rest))}`\s\((\d+)\)", SECTION)
    assert said == [str(Settings.model_fields[field].default)]
