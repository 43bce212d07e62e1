"""Starts a refit after enough new answers, waits for its process, and installs what it has made."""

import asyncio
import os
import sys
from pathlib import Path

import structlog

from motet.clock import Clock
from motet_predictor.fitted_file import read_fitted
from motet_predictor.metrics import Metrics
from motet_predictor.prompt_model import PromptModel
from motet_predictor.refit import NOTHING_TO_FIT

log = structlog.get_logger(__name__)

COMMAND = (sys.executable, "-P", "-m", "motet_predictor.refit")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

MIN_PAUSES = 9.0
"""How many times as long as a refit the pause after it is, at least: on a machine with few cores a refit takes CPU time
from the engines, also with the lowest priority."""


class Refits:
    def __init__(
        self, model: PromptModel, metrics: Metrics, path: Path, *, after_answers: int, max_seconds: float, clock: Clock
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._path = path
        self._after = after_answers
        self._max_seconds = max_seconds
        self._clock = clock
        self._due_at_answers = after_answers
        self._not_before = clock()

    async def load(self) -> None:
        """Install what the last refit has made, also one of the process before this one. If there is nothing, the first
        refit does not wait for new answers: the database may have samples."""
        try:
            self._model.install(await asyncio.to_thread(read_fitted, self._path))
        except FileNotFoundError:
            self._due_at_answers = 0
        except (OSError, ValueError) as error:
            self._due_at_answers = 0
            log.warning("weights_unreadable", path=str(self._path), reason=str(error), hint="They are fitted again.")

    async def refit_if_due(self) -> None:
        """Fit again if there are enough new answers, and wait until it is done. Never raises but by cancellation."""
        began = self._clock()
        if self._model.answers < self._due_at_answers or began < self._not_before:
            return
        self._due_at_answers = self._model.answers + self._after
        self._model.refit_begins()
        try:
            status = await self._run()
            if status == 0:
                self._model.install(await asyncio.to_thread(read_fitted, self._path))
        except (OSError, ValueError, TimeoutError) as error:
            self._failed(str(error) or f"it took longer than {self._max_seconds:.0f} s")
        else:
            if status in (0, NOTHING_TO_FIT):
                self._metrics.refits.labels("nothing" if status else "done").inc()
            else:
                self._failed(f"its process ended with status {status}")
        ended = self._clock()
        self._not_before = ended + MIN_PAUSES * (ended - began)

    async def _run(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, str(self._path), str(os.getpid()), stdin=asyncio.subprocess.DEVNULL, env=os.environ | ONE_THREAD
        )
        try:
            async with asyncio.timeout(self._max_seconds):
                return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _failed(self, reason: str) -> None:
        self._metrics.refits.labels("failed").inc()
        log.warning("refit_failed", reason=reason, hint="The predictor goes on with the weights that it has.")
