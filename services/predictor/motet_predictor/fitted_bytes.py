"""What a refit has fitted as bytes, in a file and in the database: weights, and each adapter's correction.

They have no code in them (no pickle), and everything is checked when they are read: damaged bytes are refused as a
whole."""

import io
import json
import zipfile
from pathlib import Path

import numpy as np

from motet_predictor.calibration import BINS
from motet_predictor.length_classes import CLASSES
from motet_predictor.prompt_version import Correction, Fitted
from motet_predictor.prompt_weights import MAX_WEIGHT, ROWS, PromptWeights

MAX_FITTED_BYTES = 16 * 1024 * 1024
"""A full table has 6.3 MB, 5,000 corrections with the longest names have 5.2 MB: all of it fits, also where nothing can
be compressed."""
MAX_ADAPTERS = 5000
MAX_NAMES_BYTES = 8 * 1024 * 1024
"""Names of other scripts take up to four bytes a letter. If they have more than this, the oldest corrections are left
out."""


def to_bytes(fitted: Fitted) -> bytes:
    newest = list(reversed(fitted.corrections))[:MAX_ADAPTERS]
    sizes = np.cumsum([len(_as_json(name)) + len(", ") for name in newest])
    names = newest[: np.searchsorted(sizes, MAX_NAMES_BYTES)][::-1]
    corrections = [fitted.corrections[name] for name in names]
    file = io.BytesIO()
    np.savez_compressed(
        file,
        space=np.uint32(fitted.weights.space),
        table=fitted.weights.table.astype(np.float16),  # three digits are more than their samples say
        names=np.frombuffer(_as_json(names), np.uint8),
        below=np.array([one.calibration.below for one in corrections], np.float32).reshape(len(names), BINS + 1),
        trust=np.array([one.trust for one in corrections]),
    )
    return file.getvalue()


def _as_json(names: object) -> bytes:
    return json.dumps(names, ensure_ascii=False).encode()


def from_bytes(data: bytes) -> Fitted:
    """Raises ValueError if they are damaged, or too many."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as parts:
            size = sum(part.file_size for part in parts.infolist())
        if size > MAX_FITTED_BYTES:
            raise ValueError(f"they have {size} bytes, more than {MAX_FITTED_BYTES}")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            table, below, trust = file["table"], file["below"], file["trust"]
            space, names = int(file["space"]), json.loads(file["names"].tobytes())
            pairs = [(str(tenant), str(adapter)) for tenant, adapter in names]
    except Exception as error:  # damaged bytes end in errors of many kinds, from OSError to MemoryError
        raise ValueError(f"the weights are damaged: {error!r}") from error
    if (
        table.shape != (ROWS, CLASSES)
        or table.dtype != np.float16
        or not np.abs(table).max() <= MAX_WEIGHT  # also if one is not a number
        or below.shape != (len(pairs), BINS + 1)
        or trust.shape != (len(pairs),)
        or not (np.isfinite(below).all() and (np.diff(below) >= 0).all() and (below[:, 0] >= 0).all())
        or not (below[:, -1] > 0).all()
        or not ((trust > 0) & (trust < 1)).all()
    ):
        raise ValueError("the weights are damaged: their numbers are no weights or no calibration")
    corrections = {}
    for pair, line, part in zip(pairs, below.astype(float), trust, strict=True):
        correction = corrections[pair] = Correction(trust=float(part))
        correction.calibration.below = line
    return Fitted(PromptWeights(space, table.astype(np.float32)), corrections)


def write_file(path: Path, fitted: Fitted) -> None:
    """A reader sees the whole file, or the one before it."""
    new = path.with_name(path.name + ".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    new.write_bytes(to_bytes(fitted))
    new.replace(path)


def take_file(path: Path) -> bytes:
    """The bytes of the file, which is removed. Raises OSError if there is none, and ValueError if it is too long."""
    size = path.stat().st_size
    data = path.read_bytes() if size <= MAX_FITTED_BYTES else b""
    path.unlink()
    if not data:
        raise ValueError(f"{path} has {size} bytes: it should have 1 to {MAX_FITTED_BYTES}")
    return data
