"""Names for the beginnings of a prompt: those with the same name are the same tokens.

A prompt is cut into blocks. A block's digest covers its tokens, all blocks before it, and a salt made of base model,
adapter and tenant. The first 64 bits of a digest are its hint. Gateways and runners tell the scheduler hints, so that
it can prefer a runner that has the tokens in its cache. Hints are never a proof: blocks with equal hints may differ.

A gateway hashes a prompt before anybody knows which runner gets it, and the pages of runners may have other sizes. So
all blocks have one size. The digest of a page is that of its last block: runners compare it before they share a page,
and its hint says that all blocks up to there are cached. Pure.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from motet.domain import Digest

HINT_TOKENS = 16
"""Tokens in a block"""

MAX_PROMPT_HINTS = 16
"""How many blocks of a prompt have hints: the first 256 tokens."""

MAX_CACHED_HINTS = 512
"""How many hints a runner reports, the most valuable first."""

DIGEST_BYTES = 32
_HINT_BYTES = 8
_TOKEN_BYTES = 4
_BLOCK_BYTES = HINT_TOKENS * _TOKEN_BYTES


@lru_cache(maxsize=1024)
def prefix_salt(base_digest: Digest, adapter_digest: Digest, tenant: str, own: str = "") -> bytes:
    """What the chain of digests begins with. Prompts of two tenants, or of two adapters, never share a page, nor do
    those of one tenant that have other salts of their `own`."""
    text = f"{base_digest}\n{adapter_digest}\n{tenant}" + (f"\n{own}" if own else "")
    return blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"motet-prefix").digest()


def page_digest(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a full page. `previous` is the digest of the page before it; before the first page, the salt."""
    while len(tokens) > HINT_TOKENS:  # no page of our own engine is that long
        previous = _digest(previous, _packed(tokens[:HINT_TOKENS]))
        tokens = tokens[HINT_TOKENS:]
    return _digest(previous, _packed(tokens))


def block_digests(salt: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    """The digests of all full blocks of `tokens`, one after the other."""
    digest, packed = salt, _packed(tokens)
    for start in range(0, len(packed) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        digest = _digest(digest, packed[start : start + _BLOCK_BYTES])
        yield digest


def hint_of(digest: bytes) -> int:
    """The 64 bits of a digest that travel to the scheduler."""
    return int.from_bytes(digest[:_HINT_BYTES], "little")


def prompt_hints(salt: bytes, tokens: Sequence[int]) -> list[int]:
    """The hints of the first full blocks of a prompt, at most `MAX_PROMPT_HINTS`."""
    return [hint_of(digest) for digest in block_digests(salt, tokens[: MAX_PROMPT_HINTS * HINT_TOKENS])]


def pages_with_hints(page_tokens: int) -> int:
    """How many first pages of a prompt have hints. If pages do not consist of whole blocks, none: a gateway would not
    know their digests."""
    return 0 if page_tokens % HINT_TOKENS else MAX_PROMPT_HINTS * HINT_TOKENS // page_tokens


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _digest(previous: bytes, page: bytes) -> bytes:
    return blake2b(previous + page, digest_size=DIGEST_BYTES).digest()
