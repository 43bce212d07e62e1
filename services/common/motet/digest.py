"""The digest of a set of named files: `sha256:` and 64 hex digits, the same on every machine.

Name and size are hashed before each file's bytes. So the digest changes when bytes move from one file to another.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from motet.domain import Digest

CHUNK_BYTES = 1 << 20

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""The files that every adapter has: its configuration and its weights."""

RECORD_FILE = "motet_proof.json"
"""Answers that an adapter gave where it was trained, with log probabilities: `motet adapter record` writes it."""

ADAPTER_OPTIONAL_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    RECORD_FILE,
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files that change an adapter's answers if it has them: its own chat template, tokens and defaults; and the answers
that it gave where it was trained. Those that exist beside the weights, with exactly these names, count for the digest.
No other file does. A name that you add here changes the digest of every adapter that has such a file."""

PROCESSOR_TEMPLATE = "chat_template.json"
"""Where processors of models of text and images have kept their chat template"""

ASSET_FILES = (
    "chat_template.jinja",
    PROCESSOR_TEMPLATE,
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""The files of a model that a gateway needs, where they exist."""

_PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_PARTS = ("text_config", "vision_config")


class ContentDigest:
    """Computes a digest step by step: `begin` a file, `update` with its bytes, then the next file by name."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._last = ""

    def begin(self, name: str, size: int) -> None:
        if name <= self._last:
            raise ValueError(f"files are digested in the order of their names: {name} after {self._last}")
        self._last = name
        encoded = name.encode()
        self._hash.update(b"%d:%s:%d:" % (len(encoded), encoded, size))

    def update(self, data: bytes | memoryview) -> None:
        self._hash.update(data)

    def digest(self) -> Digest:
        return Digest(_PREFIX + self._hash.hexdigest())


def digest_of(folder: Path, names: Iterable[str]) -> Digest:
    """The digest of files in a folder. All of them must exist."""
    content = ContentDigest()
    for name in sorted(set(names)):
        path = folder / name
        content.begin(name, path.stat().st_size)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                content.update(chunk)
    return content.digest()


def adapter_files(folder: Path) -> list[str]:
    """The names of all files that count for an adapter's digest, in the order in which they are hashed."""
    return sorted([*ADAPTER_FILES, *(name for name in ADAPTER_OPTIONAL_FILES if _is_file(f"{folder}/{name}"))])


def _is_file(path: str) -> bool:
    """As `Path.is_file`, in a third of the time. `os.path.isfile` would hide an error of the disk."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False


def adapter_digest(folder: Path) -> Digest:
    return digest_of(folder, adapter_files(folder))


def asset_files(folder: Path) -> list[str]:
    names = [name for name in ASSET_FILES if (folder / name).is_file()]
    if PROCESSOR_TEMPLATE in names and not _reads_more_than_text(folder):
        names.remove(PROCESSOR_TEMPLATE)  # such a model has no processor, so transformers does not read it
    return names


def _reads_more_than_text(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # who uses the file says what is wrong
        return False
    return isinstance(config, dict) and any(isinstance(config.get(part), dict) for part in _PARTS)


def asset_digest(folder: Path) -> Digest:
    return digest_of(folder, asset_files(folder))


def base_digest(folder: Path) -> Digest:
    """The digest of a base model: of its configuration and every weight file."""
    weights = [path.name for path in folder.glob("*.safetensors")]
    return digest_of(folder, ["config.json", *weights])


def hex_of(digest: Digest) -> str:
    """The hex digits, for use as a folder's name. Raises ValueError for any other text, such as one with a path."""
    if (found := _DIGEST.fullmatch(digest)) is None:
        raise ValueError(f"not a digest: {digest!r}")
    return found[1]


def is_digest(text: str) -> bool:
    try:
        return bool(hex_of(Digest(text)))
    except ValueError:
        return False


def digest_from_hex(text: str) -> Digest:
    digest = Digest(_PREFIX + text)
    hex_of(digest)
    return digest
