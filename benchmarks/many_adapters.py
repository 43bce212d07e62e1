"""Thousands of different adapters of a random Llama, of ranks 4 to 16, as a runner keeps them in its disk cache.

One adapter of each rank is random and is checked; the others of this rank are the same numbers, each begun at another
place. So they are quickly made, and need no check of their own.
"""

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from benchmarks.random_llama import LlamaShape, random_adapter
from motet.domain import Digest
from motet_runner.adapters.certification import certify
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.engine import Engine

RANKS = (4, 8, 12, 16)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LENGTH = struct.Struct("<Q")
_NUMBER_BYTES = 2


class ManyAdapters:
    """`folders[n]` is the adapter of the digest `digests[n]`."""

    def __init__(self, shape: LlamaShape, folder: Path, count: int) -> None:
        self._folder = folder
        self._first = [random_adapter(shape, folder / f"rank-{rank}", rank=rank, seed=rank) for rank in RANKS]
        self.digests = [Digest(f"sha256:{number:064x}") for number in range(count)]
        self.folders = list(self._write(count))
        self.largest = (self._first[-1] / WEIGHTS).stat().st_size
        """Bytes of an adapter with the largest rank"""

    def _write(self, count: int) -> Iterator[Path]:
        files = [(first / WEIGHTS).read_bytes() for first in self._first]
        for number in range(count):
            weights = files[number % len(RANKS)]
            start = _LENGTH.size + _LENGTH.unpack_from(weights)[0]
            turn = start + _NUMBER_BYTES * (1 + number)
            folder = self._folder / f"adapter-{number}"
            folder.mkdir()
            (folder / WEIGHTS).write_bytes(weights[:start] + weights[turn:] + weights[start:turn])
            (folder / CONFIG).write_bytes((self._first[number % len(RANKS)] / CONFIG).read_bytes())
            yield folder

    def layouts(self, engine: Engine) -> list[AdapterLayout]:
        """As a runner leaves them before their first request: checked, with their slabs written."""
        checked = [certify(first, engine.info).layout for first in self._first]
        layouts = []
        for number, folder in enumerate(self.folders):
            layout, file = checked[number % len(RANKS)], folder / WEIGHTS
            (folder / layout.linears_file).write_bytes(layout.packed)
            layout = replace(layout, path=str(file), stamp=FileStamp.of(file)).stored()
            layouts.append(layout.with_slab(self.digests[number], engine.info.run_layout))
        write_slabs(engine, layouts)
        return layouts


def write_slabs(engine: Engine, layouts: Sequence[AdapterLayout]) -> None:
    """Returns when all are there. They are written as fast as can be, since nobody is served meanwhile."""
    with patch("motet_runner.adapters.slab_writer.PACE_SECONDS", 0):
        left = {number for number, one in enumerate(layouts) if not one.file.with_name(one.slab).exists()}
        for number in sorted(left):
            engine.write_slab(number, layouts[number])
        while left:
            for written in engine.slabs_written():
                left.remove(written.number)
                if not written.bytes:
                    raise RuntimeError(f"the slab of {layouts[written.number].path} was not written")
            time.sleep(0.01)
