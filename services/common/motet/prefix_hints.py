"""Names for the first pages of a prompt: pages with the same name hold the same tokens after the same tokens.

A page's digest covers its tokens, all pages before it, and a salt made of base model, adapter and tenant. Runners
compare digests before they share a page. The first 64 bits of a digest are its hint. Gateways and runners tell the
scheduler hints, so that it can prefer a runner that has the pages in its cache. Hints are never a proof: pages with
equal hints may differ. Pure.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b

from motet.domain import PAGE_TOKENS, Digest

MAX_PROMPT_HINTS = 16
"""How many pages of a prompt have hints: the first 256 tokens."""

MAX_CACHED_HINTS = 512
"""How many hints a runner reports, the most valuable first."""

DIGEST_BYTES = 32
_HINT_BYTES = 8
_TOKEN_BYTES = 4
_PAGE_BYTES = PAGE_TOKENS * _TOKEN_BYTES


@lru_cache(maxsize=1024)
def prefix_salt(base_digest: Digest, adapter_digest: Digest, tenant: str, own: str = "") -> bytes:
    """What the chain of digests begins with. Prompts of two tenants, or of two adapters, never share a page, nor do
    those of one tenant that have other salts of their `own`."""
    text = f"{base_digest}\n{adapter_digest}\n{tenant}" + (f"\n{own}" if own else "")
    return blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"motet-prefix").digest()


def page_digest(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a full page. `previous` is the digest of the page before it; before the first page, the salt."""
    return _digest(previous, _packed(tokens))


def page_digests(salt: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    """The digests of all full pages of `tokens`, one after the other."""
    digest, packed = salt, _packed(tokens)
    for start in range(0, len(packed) - _PAGE_BYTES + 1, _PAGE_BYTES):
        digest = _digest(digest, packed[start : start + _PAGE_BYTES])
        yield digest


def hint_of(digest: bytes) -> int:
    """The 64 bits of a page's digest that travel to the scheduler."""
    return int.from_bytes(digest[:_HINT_BYTES], "little")


def prompt_hints(salt: bytes, tokens: Sequence[int]) -> list[int]:
    """The hints of the first full pages of a prompt, at most `MAX_PROMPT_HINTS`."""
    return [hint_of(digest) for digest in page_digests(salt, tokens[: MAX_PROMPT_HINTS * PAGE_TOKENS])]


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _digest(previous: bytes, page: bytes) -> bytes:
    return blake2b(previous + page, digest_size=DIGEST_BYTES).digest()
