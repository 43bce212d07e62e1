"""Plain values that all services use: tenants, requests, digests, pages and their sizes. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, NewType, Self

InstanceName = NewType("InstanceName", str)
"""A runner's name. It stays the same when the runner restarts; each start is a new incarnation."""
RequestId = NewType("RequestId", str)
Tenant = NewType("Tenant", str)
Digest = NewType("Digest", str)
"""`sha256:` and 64 hex digits. In place of an adapter's digest, the empty one means the base model."""

BASE = Digest("")

NO_TENANT = Tenant("")

MAX_LORA_RANK = 512
"""Of an adapter: what all kernels compute."""

PAGE_TOKENS = 16
"""Tokens in a page of our own engine (PU-20). A small page wastes little memory at the end of a sequence; a page that
is too small makes each copy of a page (all layers) too short to be fast. Others say theirs (`runner_info.Capacity`)."""


class ParkMethod(StrEnum):
    """What happens to the keys and values of a parked sequence."""

    SWAP = "swap"  # copied to host memory
    RECOMPUTE = "recompute"  # dropped, computed again from the tokens


class ObjectName(NamedTuple):
    """Namespace and name of a resource; `str()` gives `namespace/name`."""

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str, *, default_namespace: str = "default") -> Self:
        namespace, slash, name = text.partition("/")
        return cls(namespace, name) if slash else cls(default_namespace, text)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def pages_for(tokens: int, page_tokens: int) -> int:
    """How many pages `tokens` tokens need."""
    return -(-tokens // page_tokens)


def adapter_pages(rank: int, *, rank_bytes: int, tile: int, page_bytes: int) -> int:
    """How many pages an adapter takes: `rank_bytes` for each row of its rank, which counts as the next multiple of
    `tile`."""
    rows = -(-rank // tile) * tile
    return -(-rows * rank_bytes // max(1, page_bytes))


@dataclass(frozen=True, slots=True)
class KVShape:
    """The size of one token's keys and values (S3-02): 2 · layers · kv_heads · head_dim · bytes of the dtype."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    def bytes_per_page(self) -> int:
        return self.bytes_per_token * PAGE_TOKENS

    @classmethod
    def from_config(cls, config: Mapping[str, Any], dtype_bytes: int) -> Self:
        """Read a Hugging Face `config.json`: MHA, GQA and MQA, and GPT-2's own names for the same numbers."""
        layers = config.get("num_hidden_layers") or config["n_layer"]
        heads = config.get("num_attention_heads") or config["n_head"]
        hidden = config.get("hidden_size") or config["n_embd"]
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return cls(layers, kv_heads, head_dim, dtype_bytes)
