"""The header of a safetensors file: names, shapes and types. Reading it needs neither torch nor the weights."""

import math
import os
import re
from pathlib import Path
from typing import Any

from motet.errors import AdapterIncompatible
from motet_runner.adapters.layout import StoredTensor
from motet_runner.adapters.strict_json import parse, refuse_pointer

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Twice the bytes of a header for 20,000 linears. The format itself allows 100 MB."""

METADATA = "__metadata__"
"""The only entry that is no tensor"""
MAX_NAME_CHARS = 200
"""The most characters of a tensor's name that a message quotes"""
MAX_WHOLE_NAME_CHARS = 1024
"""A usual name has a tenth of this. Some steps of a check take time with the square of it."""
MAX_TYPE_CHARS = 16
BEGINNING_BYTES = 1 << 16
"""Of a header: what is read of one that is too long"""
MAX_DIMENSIONS = 8
MAX_NUMBER = (1 << 63) - 1
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of one value of each common type."""


_NAME = re.compile(r'"([^"\\\\]{1,400})"\s*:\s*\{')
_END = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,19}\s*,\s*(\d{1,19})\s*\]')


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Name → tensor. Raises AdapterIncompatible if the file is cut short or isn't a safetensors file."""
    raw, size = _raw_header(path)
    entries = parse(raw, f"the header of {path.name}")
    if not isinstance(entries, dict):
        raise _broken(path, "it is not an object")
    begin = end = 8 + len(raw)
    tensors = {name: _tensor(path, name, entry, begin) for name, entry in entries.items() if name != METADATA}
    for name, tensor in sorted(tensors.items(), key=lambda each: (each[1].start, each[1].bytes)):
        if tensor.start != end:  # unused bytes, or bytes that two tensors share
            raise _broken(path, f"{name[:MAX_NAME_CHARS]} does not begin where the tensor before it ends")
        end += tensor.bytes
    _check_end(path, size - begin, end - begin)
    return tensors


def header_bytes(path: Path) -> int:
    """Of the header. Raises AdapterIncompatible if the file is cut short in it or isn't a safetensors file."""
    with path.open("rb") as file:
        return _length(path, file.read(8), os.fstat(file.fileno()).st_size)


def first_names(path: Path, most: int) -> list[str] | None:
    """Of the first tensors, if the header has more than `most` bytes; None if it has not. Parses nothing."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = _length(path, file.read(8), size)
        return None if length <= most else _NAME.findall(file.read(BEGINNING_BYTES).decode(errors="replace"))


def check_whole(path: Path) -> None:
    """Raises AdapterIncompatible if the file is cut short or isn't a safetensors file. Parses nothing, which takes a
    tenth of the time: `read_header` finds what else is wrong, and a fetch need not know it."""
    raw, size = _raw_header(path)
    if not raw.lstrip().startswith(b"{"):
        raise _broken(path, "it is not an object")
    _check_end(path, size - 8 - len(raw), max(map(int, _END.findall(raw)), default=0))


def _raw_header(path: Path) -> tuple[bytes, int]:
    """The header, and the bytes of the file"""
    size = path.stat().st_size
    with path.open("rb") as file:
        return file.read(_length(path, file.read(8), size)), size


def _length(path: Path, first: bytes, size: int) -> int:
    """Of the header. `first`: the first 8 bytes of the file; `size`: its bytes"""
    refuse_pointer(first, path.name)
    length = int.from_bytes(first, "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise AdapterIncompatible(
            f"{path.name} is not a safetensors file, or it is cut short. Save the adapter again.",
            reason="FormatRejected",
        )
    return length


def _check_end(path: Path, size: int, listed: int) -> None:
    """`size`: the bytes after the header. `listed`: those that it lists"""
    if listed != size:
        raise AdapterIncompatible(
            f"{path.name} has {size} bytes of weights, but its header lists {listed}. Save the adapter again.",
            reason="FormatRejected",
        )


def _tensor(path: Path, name: str, entry: Any, begin: int) -> StoredTensor:
    if len(name) > MAX_WHOLE_NAME_CHARS:
        raise _broken(path, f"the name {name[:MAX_NAME_CHARS]}… has more than {MAX_WHOLE_NAME_CHARS} characters")
    try:
        shape, dtype, (start, end) = entry["shape"], entry["dtype"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _broken(path, f"{name[:MAX_NAME_CHARS]} lacks shape, dtype or data_offsets") from None
    numbers = [start, end, *shape] if isinstance(shape, list) else [None]
    if (
        not all(type(number) is int and 0 <= number <= MAX_NUMBER for number in numbers)
        or not isinstance(dtype, str)
        or len(dtype) > MAX_TYPE_CHARS
    ):
        raise _broken(path, f"{name[:MAX_NAME_CHARS]} has a shape, dtype or data_offsets of another form")
    width = WIDTHS.get(dtype)
    if len(shape) > MAX_DIMENSIONS or end < start or (width is not None and math.prod(shape) * width != end - start):
        raise _broken(path, f"data_offsets of {name[:MAX_NAME_CHARS]} are not those of its shape")
    return StoredTensor(begin + start, tuple(shape), dtype, end - start)


def _broken(path: Path, why: str) -> AdapterIncompatible:
    return AdapterIncompatible(
        f"The header of {path.name} is broken: {why}. Save the adapter again.", reason="FormatRejected"
    )
