"""Which files are taken from a source, and none beside them: no code, no pickles, no optimizer states."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from motet.digest import ADAPTER_FILES, ADAPTER_OPTIONAL_FILES, ASSET_FILES
from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_errors import malformed, missing, too_large

CONFIG, WEIGHTS = ADAPTER_FILES
MODEL_CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ONE_SHARD = "model.safetensors"

SMALL = 1 << 20
"""Bytes of an adapter's configuration at most."""

TEXT = 16 << 20
"""Bytes of an adapter's own template or list of tokens at most: ten times what the largest models come with."""

TOKENIZER = 64 << 20
"""Bytes of an adapter's own tokenizer.json at most: twice what the largest models come with."""

MEDIUM = 256 << 20
"""Bytes of a model's tokenizer at most."""

MAX_INDEX_BYTES = 32 << 20
"""Bytes of a model's index, which is parsed as a whole: it names a quarter of a million tensors."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt")

_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}\.safetensors")


@dataclass(frozen=True, slots=True)
class WantedFile:
    name: str
    limit: int
    """Bytes."""

    required: bool = True


def of_adapter(max_bytes: int) -> list[WantedFile]:
    """First what it must have: after that it is known that the source is open to us."""
    optional = [
        WantedFile(name, TOKENIZER if name == "tokenizer.json" else TEXT, required=False)
        for name in ADAPTER_OPTIONAL_FILES
    ]
    return [WantedFile(CONFIG, SMALL), WantedFile(WEIGHTS, max_bytes), *optional]


def most_of_adapter(max_bytes: int) -> int:
    """Bytes of all its files together."""
    return sum(file.limit for file in of_adapter(max_bytes))


def of_model() -> list[WantedFile]:
    """All but the weights: those depend on whether there is an index."""
    others = [WantedFile(name, MEDIUM, required=False) for name in ASSET_FILES if name != MODEL_CONFIG]
    return [WantedFile(MODEL_CONFIG, SMALL), WantedFile(INDEX, MAX_INDEX_BYTES, required=False), *others]


def shards(index: bytes | None, max_bytes: int) -> list[WantedFile]:
    """The weight files that an index names, or the one there is without."""
    if index is None:
        return [WantedFile(ONE_SHARD, max_bytes)]
    try:
        names = set(orjson.loads(index)["weight_map"].values())
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise malformed(f"{INDEX} has no weight_map: save the model again with save_pretrained().") from None
    strange = next((name for name in names if not isinstance(name, str) or not _SHARD.fullmatch(name)), None)
    if strange is not None or not names:
        raise malformed(f"{INDEX} names {strange!r}, which is no *.safetensors file beside it.")
    return [WantedFile(name, max_bytes) for name in sorted(names)]


def check_listing(sizes: Mapping[str, int | None], wanted: Iterable[WantedFile], max_bytes: int, source: str) -> None:
    """What a listing tells before a byte is moved: all is there and nothing is too large."""
    total = 0
    for file in wanted:
        if file.name not in sizes:
            if file.required:
                raise not_there(source, file.name, sizes)
            continue
        size = sizes[file.name] or 0
        total += size
        if size > file.limit:
            raise too_large(f"{file.name} of {source} has {size} bytes; at most {file.limit} are fetched.")
    if total > max_bytes + MEDIUM:
        raise too_large(f"{source} has {total} bytes; at most {max_bytes} are fetched.")


def not_there(source: str, name: str, others: Iterable[str] = ()) -> AdapterFetchFailed:
    pickle = next((other for other in sorted(others) if other.endswith(PICKLES)), None)
    if pickle is not None and name.endswith(".safetensors"):
        return malformed(
            f"{source} has {pickle} but no {name}: only safetensors are read, since the other formats can run code. "
            "Save it again with save_pretrained(safe_serialization=True)."
        )
    return missing(f"{source} has no {name}: it must hold what save_pretrained() writes.")
