"""Names and sizes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.domain import PAGE_TOKENS, KVShape, ObjectName, pages_for


@given(st.integers(min_value=0, max_value=10**9), st.integers(min_value=1, max_value=512))
def test_pages_hold_their_tokens_and_waste_less_than_one(tokens: int, page: int) -> None:
    pages = pages_for(tokens, page)
    assert tokens <= pages * page < tokens + page


def test_a_page_has_sixteen_tokens_by_default() -> None:
    assert [pages_for(n, PAGE_TOKENS) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert PAGE_TOKENS == 16


names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,10}[a-z0-9])?", fullmatch=True)


@given(names, names)
def test_an_object_name_survives_printing_and_parsing(namespace: str, name: str) -> None:
    assert ObjectName.parse(str(ObjectName(namespace, name))) == ObjectName(namespace, name)


def test_a_bare_name_is_in_the_default_namespace() -> None:
    assert ObjectName.parse("pirate") == ObjectName("default", "pirate")
    assert ObjectName.parse("pirate", default_namespace="acme") == ObjectName("acme", "pirate")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Multi-head, grouped, multi-query; an explicit head_dim; GPT-2's names.
        ({"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256}, KVShape(4, 8, 32, 2)),
        (
            {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256},
            KVShape(4, 2, 32, 2),
        ),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 64},
            KVShape(2, 1, 8, 2),
        ),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "head_dim": 128},
            KVShape(2, 4, 128, 2),
        ),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, KVShape(12, 12, 64, 2)),
    ],
)
def test_a_models_config_gives_the_bytes_per_token(config: dict[str, Any], expected: KVShape) -> None:
    assert KVShape.from_config(config, 2) == expected


def test_the_published_size_of_a_token() -> None:
    """GPT-J in half precision: 28 layers, 16 heads of 256 (S3-02)."""
    shape = KVShape(layers=28, kv_heads=16, head_dim=256, dtype_bytes=2)
    assert shape.bytes_per_token == 458_752
    assert shape.bytes_per_page() == 16 * 458_752
