"""`python -m motet_predictor.refit FILE PARENT`: fits weights to the samples in the database, and writes them to FILE.

A process of its own, of the lowest priority: it takes minutes of CPU time, and the predictor answers meanwhile. If it
dies, the predictor goes on with the weights that it has; if the predictor dies, it ends, too: the next predictor may
start another one that writes the same file."""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from motet.imports import without_collections

with without_collections(__name__):
    import structlog

    from motet.errors import MotetError
    from motet.read_settings import read
    from motet.settings import Database, ProcessSettings
    from motet.store import open_store
    from motet.store.length_samples import LengthSample, samples_of_all_tenants
    from motet.telemetry import configure_logging
    from motet_predictor import sample_features
    from motet_predictor.fitted_bytes import write_file
    from motet_predictor.fitting import Sample, fit, since_last_change
    from motet_predictor.settings import Settings

log = structlog.get_logger(__name__)

LOWEST_PRIORITY = 19
_PR_SET_PDEATHSIG = 1
NOTHING_TO_FIT = 3
"""Exit status: no sample has features yet."""


def usable(rows: Sequence[LengthSample]) -> tuple[int, list[Sample]]:
    """The space that most of the newest features belong to, and all samples, oldest first like `rows`. Features of
    other spaces only tell prompts apart."""
    read_rows = [(row, *sample_features.from_bytes(row.features)) for row in rows]
    return sample_features.space_in_use(space for _, space, _ in reversed(read_rows)), [
        Sample(row.tenant, row.adapter, row.output_tokens, row.censored, features, own)
        for row, own, features in read_rows
    ]


async def main(path: Path) -> int:
    settings = read(Settings)
    async with open_store(read(Database).url(read(ProcessSettings))) as store:
        rows = await samples_of_all_tenants(
            store, of_each=settings.keep_samples_of_tenant, limit=settings.refit_samples
        )
    space, samples = usable(rows)
    if not space:
        return NOTHING_TO_FIT
    write_file(path, fit(since_last_change(samples, space), space))
    return 0


def _exit_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it died before that call


if __name__ == "__main__":
    _exit_with(int(sys.argv[2]))
    os.nice(LOWEST_PRIORITY)
    configure_logging("predictor", read(ProcessSettings))
    try:
        sys.exit(asyncio.run(main(Path(sys.argv[1]))))
    except (MotetError, OSError) as error:  # of the database or of the file: not of this code
        log.warning("refit_stopped", reason=str(error))
        sys.exit(1)
