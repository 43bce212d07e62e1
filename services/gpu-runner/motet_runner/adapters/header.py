"""The header of a safetensors file: names, shapes and types, read without torch and without touching the weights."""

import json
from dataclasses import dataclass
from pathlib import Path

from motet.errors import AdapterIncompatible

HEADER_AT_MOST = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    start: int = 0
    """Of its bytes in the file."""


def read_header(path: Path) -> dict[str, Tensor]:
    """Name → tensor. Raises AdapterIncompatible when the file is cut short or not safetensors at all."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_AT_MOST):
            raise AdapterIncompatible(f"{path.name} is not a safetensors file, or it is cut short.")
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        tensors = {
            name: Tensor(tuple(entry["shape"]), entry["dtype"], end - start, 8 + length + start)
            for name, entry in entries.items()
            if name != "__metadata__"
            for start, end in [entry["data_offsets"]]
        }
        end = max((entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise AdapterIncompatible(f"{path.name} has a broken header; save the adapter again.") from error
    if end != size - 8 - length:
        raise AdapterIncompatible(f"{path.name} holds {size - 8 - length} bytes of weights and promises {end}.")
    return tensors
