"""Keeps proofs beside the adapters' files, so that a restart proves nothing anew.

A proof holds for these bytes, this layout, this base model, this engine, its data type, device and kernels, and this
version of Motet and of its checks, on this machine and its device. If any of them differs, the adapter is proved again,
and serves meanwhile. Of what another machine has proved, as may be in a shared folder, it serves meanwhile only what
differs in the machine alone: the model of its device is the same. Nothing serves that this process has found wrong
since. Runners that share a folder keep their proofs beside each other's.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from motet.domain import Digest
from motet_runner.adapters.cache import DiskCache, names_in, remove_oldest
from motet_runner.adapters.certification import Certification, EngineLimits
from motet_runner.adapters.compatibility_check import CHECK_VERSION
from motet_runner.adapters.layout import SLAB_VERSION
from motet_runner.adapters.proof import Proof
from motet_runner.adapters.recorded_answers import Comparison
from motet_runner.interface import EngineInfo

MAX_KERNELS = 8
"""The number of kernels whose proofs are kept for one adapter and engine: those that were proved last"""

MAX_PROOF_FILES = 8
"""The number of engines of one machine whose proofs are kept beside one adapter: those that proved it last"""

MAX_FILES_OF_ALL = 32
"""The same, of all machines"""

MAX_PROOF_BYTES = 16_384

MAX_WRONG = 4096
"""The number of adapters of which a process remembers that their proofs have failed here: the newest ones"""

PREFIX = "proofs-"


class ProofKey(NamedTuple):
    """What all proofs of one engine depend on, beside its kernels"""

    base_digest: Digest
    limits: str
    """The text of `EngineLimits`, with the data type"""
    adapter_layout: str
    """How adapters lie in the engine's memory"""
    backend: str
    device: str
    version: str
    """Of the engine, and of Motet with its kernels"""
    checker: int = CHECK_VERSION
    hardware: str = ""
    """The model of the device"""
    machine: str = ""
    """The machine and its device. What another one has proved, this one may compute wrongly."""

    @classmethod
    def of(cls, info: EngineInfo, base_digest: Digest) -> "ProofKey":
        limits = str(EngineLimits.of_engine(info))
        rank = f"tile {info.adapter_rank_tile}, bytes {info.adapter_rank_bytes}"
        adapter_layout = f"{rank}, {info.run_layout}, slabs {SLAB_VERSION}"
        versions = f"{info.version} {version('motet')}"
        return cls(
            base_digest,
            limits,
            adapter_layout,
            info.backend,
            info.device,
            versions,
            hardware=info.hardware,
            machine=info.machine,
        )

    def file_name(self, digest: Digest, linears_file: str) -> str:
        """Of the proofs of one adapter. `linears_file`: its name says what is in the layout."""
        return f"{self.names_of_build(digest, linears_file)}{self.end_of_names}"

    def names_of_build(self, digest: Digest, linears_file: str) -> str:
        """How the names begin that differ in the machine alone"""
        return f"{PREFIX}{_hash(orjson.dumps([digest, linears_file, *self.build]))}-"

    @property
    def end_of_names(self) -> str:
        """Of this machine's files"""
        return f"{_hash(self.machine.encode())[:16]}.json"

    @property
    def build(self) -> tuple[object, ...]:
        """What differs in the machine alone"""
        return self[:-1]

    @property
    def build_name(self) -> str:
        return _hash(orjson.dumps(self.build))

    def encode(self, digest: Digest, linears_file: str, proofs: Iterable[Proof]) -> bytes:
        packed, found = self._packed(digest, linears_file), _packed_proofs(proofs)
        return orjson.dumps({"key": packed.decode(), "proofs": found.decode(), "sum": _hash(packed + found)})

    def decode(self, digest: Digest, linears_file: str, content: bytes) -> tuple[Proof, ...]:
        """None if `encode` has not written this for the same key, or the file is damaged."""
        key, proofs = _decode(content)
        return proofs if key == orjson.loads(self._packed(digest, linears_file)) else ()

    def _packed(self, digest: Digest, linears_file: str) -> bytes:
        return orjson.dumps([digest, linears_file, *self])


class KeptProofs:
    def __init__(self, cache: DiskCache, key: ProofKey, *, linears: bool = True) -> None:
        """`linears`: the engine proves linears; a comparison of recorded answers alone does not count as a proof."""
        self._cache = cache
        self._key = key
        self._linears = linears
        self._wrong: dict[Digest, None] = {}
        """What this engine has found wrong. A neighbour of the same hardware may have proved it since."""

    def concern(self, checked: Certification) -> bool:
        """False: there is nothing of the adapter that the engine proves or compares."""
        return self._linears or checked.recorded

    def of(self, folder: Path, digest: Digest, checked: Certification) -> tuple[Proof, ...]:
        """The proofs of this engine, one for each of its kernels; none from a file that says something else"""
        if digest in self._wrong:
            return ()
        linears_file = checked.layout.linears_file
        try:
            content = _read(folder / self._key.file_name(digest, linears_file))
        except OSError:
            return ()
        return tuple(one for one in self._key.decode(digest, linears_file, content) if self._counts(one))

    def _counts(self, proof: Proof) -> bool:
        return proof.linears or not self._linears

    def any_of(self, folder: Path, digest: Digest) -> bool:
        """True if an engine of this machine has proved it, also one that differs from this one, but for the backend:
        vLLM proves less."""
        ours, kind = [self._key.hardware, self._key.machine], ProofKey._fields.index("backend") - len(ProofKey._fields)
        found = self._found(folder, digest, PREFIX, self._key.end_of_names)
        return any(key[-2:] == ours and key[kind] == self._key.backend for key, _ in found)

    def elsewhere(self, folder: Path, digest: Digest, checked: Certification) -> tuple[str, ...]:
        """The kernels by which another machine has proved it that differs in nothing else"""
        linears_file, kernels = checked.layout.linears_file, dict[str, None]()
        same = [digest, linears_file, *self._key.build]
        for key, proofs in self._found(folder, digest, self._key.names_of_build(digest, linears_file), ".json"):
            if key[:-1] == same and key[-1] != self._key.machine:
                kernels |= dict.fromkeys(one.kernels for one in proofs)
        return tuple(kernels)[:MAX_KERNELS]

    def _found(self, folder: Path, digest: Digest, beginning: str, end: str) -> Iterator[tuple[list[Any], list[Proof]]]:
        """The keys and proofs of one adapter in the files that begin and end so; none of what was found wrong here"""
        if digest in self._wrong:
            return
        with suppress(OSError):
            names = (name for name in names_in(folder, beginning) if name.endswith(end))
            for name in islice(names, MAX_FILES_OF_ALL):
                key, proofs = _decode(_read(folder / name))
                counting = list(filter(self._counts, proofs))
                if counting and key and key[0] == digest:
                    yield key, counting

    def found_wrong(self, digest: Digest) -> None:
        self._wrong.pop(digest, None)
        self._wrong[digest] = None
        if len(self._wrong) > MAX_WRONG:
            del self._wrong[next(iter(self._wrong))]

    def forget(self, folder: Path) -> None:
        """All proofs of an adapter by this machine, also of other engines"""
        with suppress(FileNotFoundError):  # the folder may have gone
            for name in names_in(folder, PREFIX):
                if name.endswith(self._key.end_of_names):
                    (folder / name).unlink(missing_ok=True)

    def keep(self, folder: Path, digest: Digest, checked: Certification, proof: Proof) -> None:
        self._wrong.pop(digest, None)
        others = (one for one in self.of(folder, digest, checked) if one.kernels != proof.kernels)
        linears_file = checked.layout.linears_file
        content = self._key.encode(digest, linears_file, (*others, proof))
        if self._cache.keep(folder, {self._key.file_name(digest, linears_file): content}):
            with suppress(OSError):
                remove_oldest(folder, PREFIX, self._key.end_of_names, most=MAX_PROOF_FILES)
                remove_oldest(folder, PREFIX, ".json", most=MAX_FILES_OF_ALL)


def _read(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(MAX_PROOF_BYTES)


def _decode(content: bytes) -> tuple[list[Any], tuple[Proof, ...]]:
    """What a file says that `ProofKey.encode` has written: the key, and the proofs. Nothing, if it is damaged."""
    try:
        kept: dict[str, str] = orjson.loads(content)
        key, found = kept["key"], kept["proofs"]
        if kept["sum"] != _hash(key.encode() + found.encode()):
            return [], ()
        return list(orjson.loads(key)), tuple(_proof(*one) for one in orjson.loads(found))
    except (LookupError, TypeError, ValueError, AttributeError):
        return [], ()


def _packed_proofs(proofs: Iterable[Proof]) -> bytes:
    found = [(*one[:-1], None if one.recorded is None else tuple(one.recorded)) for one in proofs]
    return orjson.dumps(found[-MAX_KERNELS:])


def _proof(kernels: str, moved: float, composition: float, linears: bool, recorded: list[Any] | None) -> Proof:
    compared = None if recorded is None else Comparison(*recorded)
    return Proof(str(kernels), float(moved), float(composition), bool(linears), compared)


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
