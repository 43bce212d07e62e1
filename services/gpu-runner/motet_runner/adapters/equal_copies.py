"""Copies of the base model's embeddings and output layer that lie beside an adapter, as PEFT saves them by itself where
it thinks that a vocabulary has grown. A copy that equals the base model's matrix changes nothing, so it is left out."""

import re
from pathlib import Path
from typing import BinaryIO

import numpy as np
import orjson

from motet_runner.adapters.layout import StoredTensor
from motet_runner.adapters.safetensors_header import read_header

MATRIX = re.compile(r"(?:^|\.)((?:lm_head|embed_out|embed_tokens|embed_in|wte)\.weight)")
EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight")
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
CHUNK_BYTES = 1 << 22


def without_copies(tensors: dict[str, StoredTensor], weights: Path, base: Path) -> dict[str, StoredTensor]:
    """What is not equal stays: it is refused as any tensor that belongs to no linear."""
    matched = {name: match[1] for name in tensors if (match := MATRIX.search(name)) is not None}
    matrices = {name: matrix for name, matrix in matched.items() if name.endswith(matrix)}
    if not matrices:
        return tensors
    of_base = _matrices_of(base)
    equal = set()
    for name, matrix in matrices.items():
        # Where the base model has no output layer of its own, its embeddings are that, too.
        ends = (matrix,) if any(one.endswith(matrix) for one in of_base) else EMBEDDINGS
        originals = [place for one, place in of_base.items() if one.endswith(ends)]
        if len(originals) == 1 and _are_equal((weights, tensors[name]), originals[0]):
            equal.add(name)
    return {name: tensor for name, tensor in tensors.items() if name not in equal}


Place = tuple[Path, StoredTensor]


def _matrices_of(base: Path) -> dict[str, Place]:
    """Empty: the model's files are of another kind."""
    if (base / ONE_FILE).is_file():
        files = {ONE_FILE}
    elif (base / INDEX).is_file():
        listed = orjson.loads((base / INDEX).read_bytes())["weight_map"]
        files = {file for name, file in listed.items() if MATRIX.search(name)}
    else:
        return {}
    headers = [(base / file, read_header(base / file)) for file in sorted(files)]
    return {name: (file, one) for file, header in headers for name, one in header.items() if MATRIX.search(name)}


def _are_equal(copy: Place, original: Place) -> bool:
    """Whether the numbers are equal, also if the copy has them in 32 bits and the original in 16."""
    (_, one), (_, other) = copy, original
    widened = one.dtype == "F32" and other.dtype in {"BF16", "F16"}
    if one.shape != other.shape or not (one.dtype == other.dtype or widened):
        return False
    with copy[0].open("rb") as file, original[0].open("rb") as base:
        file.seek(one.start)
        base.seek(other.start)
        left = other.bytes
        while left:
            size = min(left, CHUNK_BYTES)
            left -= size
            if file.read(2 * size if widened else size) != _read(base, size, other.dtype if widened else ""):
                return False
    return True


def _read(file: BinaryIO, size: int, widened_from: str) -> bytes:
    found = file.read(size)
    if widened_from == "F16":
        return np.frombuffer(found, "<f2").astype("<f4").tobytes()
    if widened_from == "BF16":
        return (np.frombuffer(found, "<u2").astype("<u4") << 16).tobytes()
    return found
