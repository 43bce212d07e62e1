"""Which files are taken from a source. All others stay there, such as code, pickles and optimizer states."""

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
"""The most bytes of an adapter's configuration."""

TEXT = 16 << 20
"""The most bytes of an adapter's own template or list of tokens: ten times those of the largest models."""

TOKENIZER = 64 << 20
"""The most bytes of an adapter's own tokenizer.json: twice those of the largest models."""

MEDIUM = 256 << 20
"""The most bytes of a model's tokenizer."""

MAX_INDEX_BYTES = 32 << 20
"""The most bytes of a model's index, which is parsed as a whole: enough to name a quarter of a million tensors."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt")

_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}\.safetensors")


@dataclass(frozen=True, slots=True)
class WantedFile:
    name: str
    limit: int
    """The most bytes that are fetched."""

    required: bool = True


def of_adapter(max_bytes: int) -> list[WantedFile]:
    """The required files come first. Once they are fetched, it is known that the source can be read."""
    optional = [
        WantedFile(name, TOKENIZER if name == "tokenizer.json" else TEXT, required=False)
        for name in ADAPTER_OPTIONAL_FILES
    ]
    return [WantedFile(CONFIG, SMALL), WantedFile(WEIGHTS, max_bytes), *optional]


def most_of_adapter(max_bytes: int) -> int:
    """The most bytes of all files of an adapter together."""
    return sum(file.limit for file in of_adapter(max_bytes))


def of_model() -> list[WantedFile]:
    """All files but the weights: which weight files there are depends on the index."""
    others = [WantedFile(name, MEDIUM, required=False) for name in ASSET_FILES if name != MODEL_CONFIG]
    return [WantedFile(MODEL_CONFIG, SMALL), WantedFile(INDEX, MAX_INDEX_BYTES, required=False), *others]


def shards(index: bytes | None, max_bytes: int) -> list[WantedFile]:
    """The weight files that an index names. Without an index, a model has one weight file."""
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
    """Check a listing before any file is fetched. Raises AdapterFetchFailed if a required file is missing, or if files
    are too large."""
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
