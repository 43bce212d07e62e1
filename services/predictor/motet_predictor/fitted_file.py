"""The file in which a refit hands over what it has fitted: weights, and each adapter's calibration.

It has no code in it (no pickle), and everything is checked when it is read: a damaged file is refused as a whole."""

import json
from pathlib import Path

import numpy as np

from motet_predictor.calibration import BINS
from motet_predictor.length_classes import CLASSES
from motet_predictor.prompt_model import AdapterState, Fitted
from motet_predictor.prompt_weights import MAX_WEIGHT, ROWS, PromptWeights

MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_ADAPTERS = 5000


def write_fitted(path: Path, fitted: Fitted) -> None:
    """A reader sees the whole file, or the one before it."""
    names = list(fitted.adapters)[-MAX_ADAPTERS:]
    states = list(fitted.adapters.values())[-MAX_ADAPTERS:]
    new = path.with_name(path.name + ".new")
    path.parent.mkdir(parents=True, exist_ok=True)
    with new.open("wb") as file:
        np.savez(
            file,
            space=np.uint32(fitted.weights.space),
            table=fitted.weights.table,
            names=np.frombuffer(json.dumps(names).encode(), np.uint8),
            below=np.array([state.calibration.below for state in states]).reshape(len(states), BINS + 1),
            trust=np.array([state.trust for state in states]),
        )
    new.replace(path)


def read_fitted(path: Path) -> Fitted:
    """Raises OSError if there is no such file, and ValueError if it is damaged."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    with path.open("rb") as bytes_of:
        try:
            with np.load(bytes_of, allow_pickle=False) as file:
                table, below, trust = file["table"], file["below"], file["trust"]
                space, names = int(file["space"]), json.loads(file["names"].tobytes())
                pairs = [(str(tenant), str(adapter)) for tenant, adapter in names]
        except Exception as error:  # damaged bytes end in errors of many kinds, from OSError to MemoryError
            raise ValueError(f"{path} is damaged: {error!r}") from error
    if (
        table.shape != (ROWS, CLASSES)
        or table.dtype != np.float32
        or not np.abs(table).max() <= MAX_WEIGHT  # also if one is not a number
        or below.shape != (len(pairs), BINS + 1)
        or trust.shape != (len(pairs),)
        or not (np.isfinite(below).all() and (np.diff(below) >= 0).all() and (below[:, 0] >= 0).all())
        or not (below[:, -1] > 0).all()
        or not ((trust > 0) & (trust < 1)).all()
    ):
        raise ValueError(f"{path} is damaged: its numbers are no weights or no calibration")
    adapters = {}
    for (tenant, adapter), line, part in zip(pairs, below, trust, strict=True):
        state = adapters[tenant, adapter] = AdapterState(trust=float(part))
        state.calibration.below = line
    return Fitted(PromptWeights(space, table), adapters)
