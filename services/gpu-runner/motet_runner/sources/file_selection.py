"""Which files are fetched from a source. Code, pickles and optimizer states, for example, are never fetched."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import orjson

from motet.digest import ADAPTER_FILES, ADAPTER_OPTIONAL_FILES, ASSET_FILES, RECORD_FILE
from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_errors import malformed, missing, too_large

CONFIG, WEIGHTS = ADAPTER_FILES
MODEL_CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ONE_SHARD = "model.safetensors"

MAX_CONFIG_BYTES = 1 << 20
"""The most bytes of a configuration: ten times the bytes of an adapter's configuration that names each module of a
large mixture of experts."""

MAX_TEXT_BYTES = 16 << 20
"""The most bytes of an adapter's own template or list of tokens: ten times the bytes of the largest models' files."""

MAX_TOKENIZER_BYTES = 64 << 20
"""The most bytes of an adapter's own tokenizer.json: twice the bytes of the largest models' files."""

MAX_RECORD_BYTES = 256 << 10
"""The most bytes of an adapter's recorded answers: what `motet adapter record` writes at most"""

LIMITS = {"tokenizer.json": MAX_TOKENIZER_BYTES, RECORD_FILE: MAX_RECORD_BYTES}
"""Of optional files that have others than `MAX_TEXT_BYTES`"""

MAX_ASSET_BYTES = 256 << 20
"""The most bytes of a model's tokenizer."""

MAX_INDEX_BYTES = 32 << 20
"""The most bytes of a model's index, which is parsed as a whole. They can name a quarter of a million tensors."""

PICKLES = (".bin", ".pt", ".pth", ".ckpt")

_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}\.safetensors")


@dataclass(frozen=True, slots=True)
class WantedFile:
    name: str
    limit: int
    """The most bytes that are fetched."""

    required: bool = True


def of_adapter(max_bytes: int) -> list[WantedFile]:
    """The required files come first: once they are fetched, the source is known to be readable."""
    optional = [WantedFile(name, LIMITS.get(name, MAX_TEXT_BYTES), required=False) for name in ADAPTER_OPTIONAL_FILES]
    return [WantedFile(CONFIG, MAX_CONFIG_BYTES), WantedFile(WEIGHTS, max_bytes), *optional]


def of_model() -> list[WantedFile]:
    """All files but the weights: the index names the weight files."""
    others = [WantedFile(name, MAX_ASSET_BYTES, required=False) for name in ASSET_FILES if name != MODEL_CONFIG]
    return [WantedFile(MODEL_CONFIG, MAX_CONFIG_BYTES), WantedFile(INDEX, MAX_INDEX_BYTES, required=False), *others]


def shards(index: bytes | None, max_bytes: int) -> list[WantedFile]:
    """The weight files that an index names. Without an index, a model has one weight file."""
    if index is None:
        return [WantedFile(ONE_SHARD, max_bytes)]
    try:
        names = set(orjson.loads(index)["weight_map"].values())
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise malformed(f"{INDEX} has no weight_map. Save the model again with save_pretrained().") from None
    invalid = next((name for name in names if not isinstance(name, str) or not _SHARD.fullmatch(name)), None)
    if invalid is not None or not names:
        raise malformed(
            f"{INDEX} names {invalid!r}, which is not a *.safetensors file beside it. Save the model again with "
            "save_pretrained()."
        )
    return [WantedFile(name, max_bytes) for name in sorted(names)]


def check_listing(sizes: Mapping[str, int | None], wanted: Iterable[WantedFile], max_bytes: int, source: str) -> None:
    """Check a listing before any file is fetched. Raises AdapterFetchFailed if a required file is missing, or if files
    are too large."""
    total = 0
    for file in wanted:
        if file.name not in sizes:
            if file.required:
                raise missing_file(source, file.name, sizes)
            continue
        size = sizes[file.name] or 0
        total += size
        if size > file.limit:
            raise too_large(f"{file.name} of {source} has {size} bytes, but Motet fetches at most {file.limit}.")
    if total > max_bytes + MAX_ASSET_BYTES:
        raise too_large(f"{source} has {total} bytes, but Motet fetches at most {max_bytes}.")


def missing_file(source: str, name: str, others: Iterable[str] = ()) -> AdapterFetchFailed:
    pickle = next((other for other in sorted(others) if other.endswith(PICKLES)), None)
    if pickle is not None and name.endswith(".safetensors"):
        return malformed(
            f"{source} has {pickle} but no {name}. Motet reads only safetensors, because the other formats can run "
            "code. Save it again with save_pretrained(safe_serialization=True)."
        )
    return missing(f"{source} has no {name}. It must have the files that save_pretrained() writes.")
