"""Starts a refit after enough new answers, waits for its process, and installs what it has made."""

import asyncio
import os
import sys
from pathlib import Path

import structlog

from motet_predictor.fitted_file import read_fitted
from motet_predictor.metrics import Metrics
from motet_predictor.prompt_model import PromptModel
from motet_predictor.refit import NOTHING_TO_FIT

log = structlog.get_logger(__name__)

COMMAND = (sys.executable, "-P", "-m", "motet_predictor.refit")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Refits:
    def __init__(
        self, model: PromptModel, metrics: Metrics, path: Path, *, after_answers: int, max_seconds: float
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._path = path
        self._after = after_answers
        self._max_seconds = max_seconds
        self._answers_at_last = 0

    async def load(self) -> None:
        """Install what the last refit has made, also one of the process before this one."""
        try:
            self._model.install(await asyncio.to_thread(read_fitted, self._path))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("weights_unreadable", path=str(self._path), reason=str(error), hint="They are fitted again.")

    async def refit_if_due(self) -> None:
        """Fit again if there are enough new answers, and wait until it is done. Never raises but by cancellation."""
        answers = self._model.answers
        if answers - self._answers_at_last < self._after:
            return
        self._answers_at_last = answers
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

    async def _run(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, str(self._path), stdin=asyncio.subprocess.DEVNULL, env=os.environ | ONE_THREAD
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
