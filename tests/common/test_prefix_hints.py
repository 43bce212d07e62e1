"""Digests and hints of a prompt's blocks: equal for equal tokens after equal tokens, and for nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.domain import BASE, Digest
from motet.prefix_hints import (
    HINT_TOKENS,
    MAX_PROMPT_HINTS,
    block_digests,
    hint_of,
    page_digest,
    pages_with_hints,
    prefix_salt,
    prompt_hints,
)

SALT = prefix_salt(Digest("sha256:base"), BASE, "tenant-a")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=10 * HINT_TOKENS)


@given(TOKENS, TOKENS)
def test_two_prompts_share_the_hints_of_the_blocks_that_they_have_in_common_and_no_others(left, right):
    common = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        common += 1
    pairs = list(zip(prompt_hints(SALT, left), prompt_hints(SALT, right), strict=False))
    assert [one == other for one, other in pairs] == [block < common // HINT_TOKENS for block in range(len(pairs))]


def test_a_block_counts_only_when_it_is_full():
    assert prompt_hints(SALT, range(HINT_TOKENS - 1)) == []
    assert len(prompt_hints(SALT, range(HINT_TOKENS))) == 1
    assert len(prompt_hints(SALT, range(3 * HINT_TOKENS + 5))) == 3


def test_only_the_first_blocks_of_a_long_prompt_have_hints():
    assert len(prompt_hints(SALT, range(100 * HINT_TOKENS))) == MAX_PROMPT_HINTS


def test_the_same_tokens_have_other_hints_under_another_base_adapter_or_tenant():
    base, adapter = Digest("sha256:base"), Digest("sha256:adapter")
    salts = {
        prefix_salt(base, BASE, "a"),
        prefix_salt(base, BASE, "b"),
        prefix_salt(base, adapter, "a"),
        prefix_salt(adapter, BASE, "a"),
        prefix_salt(BASE, adapter, "a"),
    }
    hints = {tuple(prompt_hints(salt, range(HINT_TOKENS))) for salt in salts}
    assert len(hints) == len(salts)


def test_a_hint_is_the_first_64_bits_of_its_blocks_digest():
    tokens = list(range(2 * HINT_TOKENS))
    digests = list(block_digests(SALT, tokens))
    assert [len(digest) for digest in digests] == [32, 32]
    assert digests[1] == page_digest(digests[0], tokens[HINT_TOKENS:])
    assert prompt_hints(SALT, tokens) == [hint_of(digest) for digest in digests]
    assert all(0 <= hint < 2**64 for hint in prompt_hints(SALT, tokens))


@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_the_hint_of_a_page_is_that_of_its_last_block(blocks):
    """So a gateway need not know how large the pages of a runner are."""
    size, tokens = blocks * HINT_TOKENS, range(256)
    digests = [SALT]
    for start in range(0, len(tokens), size):
        digests.append(page_digest(digests[-1], tokens[start : start + size]))
    assert list(map(hint_of, digests[1:])) == prompt_hints(SALT, tokens)[blocks - 1 :: blocks]


@pytest.mark.parametrize(("size", "pages"), [(16, 16), (32, 8), (128, 2), (256, 1), (272, 0), (24, 0), (8, 0), (1, 0)])
def test_pages_have_hints_if_they_consist_of_the_first_blocks(size, pages):
    assert pages_with_hints(size) == pages


def test_hints_are_the_same_in_every_version():
    """Gateways and runners of two versions compare them. Another function needs another field."""
    assert prompt_hints(SALT, range(2 * HINT_TOKENS)) == [17547072733552479353, 3374878110231157864]
