"""What bytes are called: `sha256:` over named files, the same on every machine.

The names and sizes go in before each file's bytes, so that moving a byte from one file to the next is another digest.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from motet.domain import Digest

CHUNK_BYTES = 1 << 20

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What an adapter must have: its configuration and its weights."""

ADAPTER_OPTIONAL_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What changes its answers where it has it: a template, tokens and defaults of its own. Those that exist belong to its
digest, by these exact names and right beside its weights; no other file does. An adapter without any has the digest
that it had before there was this list. A name that is added here changes the digest of every adapter with that file."""

ASSET_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""What a gateway needs of a model to speak to it; those that exist."""

_PREFIX = "sha256:"


class ContentDigest:
    """A digest that grows while bytes pass by: `begin` a file, `update` with its bytes, then the next by name."""

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
    """The digest of these files of a folder. All must exist."""
    content = ContentDigest()
    for name in sorted(set(names)):
        path = folder / name
        content.begin(name, path.stat().st_size)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                content.update(chunk)
    return content.digest()


def adapter_files(folder: Path) -> list[str]:
    """All that belongs to an adapter's digest, in the order in which it is digested."""
    return sorted([*ADAPTER_FILES, *(name for name in ADAPTER_OPTIONAL_FILES if (folder / name).is_file())])


def adapter_digest(folder: Path) -> Digest:
    return digest_of(folder, adapter_files(folder))


def asset_files(folder: Path) -> list[str]:
    return [name for name in ASSET_FILES if (folder / name).is_file()]


def asset_digest(folder: Path) -> Digest:
    return digest_of(folder, asset_files(folder))


def base_digest(folder: Path) -> Digest:
    """Of a base model: its configuration and every weight file. What adapters are checked against and KV belongs to."""
    weights = [path.name for path in folder.glob("*.safetensors")]
    return digest_of(folder, ["config.json", *weights])


def hex_of(digest: Digest) -> str:
    """The digest as a folder's name. Raises ValueError for what is no digest, so that no path can hide in one."""
    text = digest.removeprefix(_PREFIX)
    if not digest.startswith(_PREFIX) or len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ValueError(f"not a digest: {digest!r}")
    return text


def digest_from_hex(text: str) -> Digest:
    digest = Digest(_PREFIX + text)
    hex_of(digest)
    return digest
