"""Starts a refit after enough new answers, waits for its process, and offers what it has made as a version."""

import asyncio
import os
import sys
from pathlib import Path

import structlog

from motet.clock import Clock
from motet_predictor.fitted_bytes import take_file
from motet_predictor.kept_versions import KeptVersions
from motet_predictor.metrics import Metrics
from motet_predictor.prompt_model import PromptModel
from motet_predictor.refit import NOTHING_TO_FIT

log = structlog.get_logger(__name__)

COMMAND = (sys.executable, "-P", "-m", "motet_predictor.refit")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

MIN_PAUSES = 9.0
"""How many times as long as a refit the pause after it is, at least: on a machine with few cores a refit takes CPU time
from the engines, also with the lowest priority."""

PAUSE_AFTER_START_SECONDS = 300.0
"""Before the first refit of a process. Where a refit takes more memory than its container may, the predictor ends with
it: then it must have the time to learn and to write before the next one."""


class Refits:
    def __init__(
        self,
        model: PromptModel,
        versions: KeptVersions,
        metrics: Metrics,
        path: Path,
        *,
        after_answers: int,
        max_seconds: float,
        pause_after_start: float,
        clock: Clock,
    ) -> None:
        self._model = model
        self._versions = versions
        self._metrics = metrics
        self._path = path
        self._after = after_answers
        self._max_seconds = max_seconds
        self._clock = clock
        self._due_at_answers: int | None = None
        """None: not known before versions are loaded"""
        self._not_before = clock() + pause_after_start

    async def refit_if_due(self) -> None:
        """Fit again if there are enough new answers and no candidate, and wait until it is done. Never raises but by
        cancellation."""
        if not self._is_due():
            return
        began = self._clock()
        self._due_at_answers = self._model.answers + self._after
        self._model.refit_begins()
        try:
            status = await self._run()
            if status == 0:
                await self._versions.offer(await asyncio.to_thread(take_file, self._path))
        except (OSError, ValueError, TimeoutError) as error:
            self._failed(str(error) or f"it took longer than {self._max_seconds:.0f} s")
        else:
            if status in (0, NOTHING_TO_FIT):
                self._metrics.refits.labels("nothing" if status else "done").inc()
            else:
                self._failed(f"its process ended with status {status}")
        ended = self._clock()
        self._not_before = ended + MIN_PAUSES * (ended - began)

    def _is_due(self) -> bool:
        if self._due_at_answers is None:
            if not self._versions.loaded:
                return False
            self._due_at_answers = self._model.answers + self._after - self._answers_before()
        return (
            not self._model.awaits_a_decision
            and self._model.answers >= self._due_at_answers
            and self._clock() >= self._not_before
        )

    def _answers_before(self) -> int:
        """How many answers an earlier process has had since the last refit: the newest weights have judged them."""
        if self._model.serving.weights is None:
            return self._after  # the first refit does not wait for new answers: the database may have samples
        return min(one.judged.answers for one in self._model.versions if one.weights is not None)

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
