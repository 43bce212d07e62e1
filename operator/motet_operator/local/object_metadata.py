"""Generation and age of each object, which the API server keeps on a cluster, and the stamps of adapters' folders.

Stored on disk, so that a restart of the operator changes none of them.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from motet.processes.records import write_atomically
from motet.resources import Manifest


@dataclass(frozen=True, slots=True)
class ObjectMetadata:
    generation: int
    age: int


class MetadataFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[object]] = {}
        self._next_age = 1
        with suppress(OSError, ValueError, TypeError, KeyError):
            content = orjson.loads(path.read_bytes())
            self._known = content["objects"]
            self._next_age = content["next"]

    def remember(self, manifests: list[Manifest]) -> dict[tuple[str, str], ObjectMetadata]:
        """Number the objects: a changed spec is the next generation, and a new object is younger than all others."""
        before = self._known
        self._known = {}
        found: dict[tuple[str, str], ObjectMetadata] = {}
        for manifest in manifests:
            key = " ".join(manifest.key)
            # The folder counts, too: a relative URI means something else in another folder.
            content = f"{Path(manifest.place.file).parent}\n{manifest.resource.model_dump_json()}"
            spec = hashlib.sha256(content.encode()).hexdigest()[:16]
            match before.get(key):
                case [int(generation), str(old), int(age)]:
                    entry = ObjectMetadata(generation + (old != spec), age)
                case _:
                    entry = ObjectMetadata(1, self._next_age)
                    self._next_age += 1
            self._known[key] = [entry.generation, spec, entry.age]
            found[manifest.key] = entry
        if self._known != before:
            with suppress(OSError):  # the disk is full: the numbers start again with the next operator
                write_atomically(self._path, orjson.dumps({"objects": self._known, "next": self._next_age}))
        return found


class StampsFile:
    """The stamp of each adapter's folder, by its source."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, str]:
        with suppress(OSError, ValueError, AttributeError):
            return {source: str(stamp) for source, stamp in orjson.loads(self._path.read_bytes()).items()}
        return {}

    def write(self, stamps: Mapping[str, str]) -> None:
        with suppress(OSError):  # the disk is full: the next operator may check adapters again
            write_atomically(self._path, orjson.dumps(stamps))
