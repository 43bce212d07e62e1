"""`python -m motet_predictor.refit FILE`: fits weights to the samples in the database, and writes them to a file.

A process of its own, of the lowest priority: it takes minutes of CPU time, and the predictor answers meanwhile. If it
dies, its file is missing or part of an earlier one, and the predictor goes on with the weights that it has."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from motet.service_main import read
from motet.settings import Database, ProcessSettings
from motet.store import open_store
from motet.store.length_samples import LengthSample, samples_of_all_tenants
from motet_predictor import sample_features
from motet_predictor.fitted_file import write_fitted
from motet_predictor.fitting import Sample, fit, since_last_change
from motet_predictor.settings import Settings

LOWEST_PRIORITY = 19
NOTHING_TO_FIT = 3
"""Exit status: no sample has features yet."""


def usable(rows: Sequence[LengthSample]) -> tuple[int, list[Sample]]:
    """The space that most tenants' newest features belong to, and all samples, without features of other spaces."""
    read_rows = [(row, *sample_features.from_bytes(row.features)) for row in rows]
    newest = {row.tenant: space for row, space, _ in read_rows if space}
    space = Counter(newest.values()).most_common(1)[0][0] if newest else 0
    return space, [
        Sample(
            row.tenant,
            row.adapter,
            row.output_tokens,
            row.censored,
            features if own == space else sample_features.NO_FEATURES,
        )
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
    write_fitted(path, fit(since_last_change(samples), space))
    return 0


if __name__ == "__main__":
    os.nice(LOWEST_PRIORITY)
    sys.exit(asyncio.run(main(Path(sys.argv[1]))))
