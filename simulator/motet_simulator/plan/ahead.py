"""Simulates the next seeds of a search in processes of their own, while the search waits for one of them.

A search goes on from what it has seen, and most seeds say the same: so the number of runners that is tried with one
seed is tried with the next ones meanwhile. What was not needed then is forgotten, so the answer is the same as without.
"""

import multiprocessing
import signal
from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

from motet_simulator.plan.trial import Question, Trial

_SPAWN = multiprocessing.get_context("spawn")  # the process that asks may have threads, so it must not fork


class Ahead:
    def __init__(self, question: Question, seeds: Iterable[int], *, whole: bool, processes: int) -> None:
        """`whole`: as in `Question.simulate`. `processes`: how many simulations run at a time; 1: all run here."""
        self._question = question
        self._seeds = tuple(seeds)
        self._whole = whole
        self._processes = processes
        self._begun: dict[tuple[int, int], _Begun] = {}

    def simulate(self, runners: int, seed: int) -> Trial:
        if min(self._processes, len(self._seeds)) > 1:
            self._begin(runners, seed)
            for later in self._seeds[self._seeds.index(seed) + 1 :]:
                if sum(not begun.answer.poll() for begun in self._begun.values()) < self._processes:
                    self._begin(runners, later)
            try:
                trial: Trial = self._begun[runners, seed].answer.recv()
            except EOFError:
                pass  # it has failed, such as for lack of memory: alone it may not, and if it does, here is told why
            else:
                return trial
        return self._question.simulate(runners, seed, whole=self._whole)

    def close(self) -> None:
        for begun in self._begun.values():
            begun.process.terminate()
            begun.process.join()

    def _begin(self, runners: int, seed: int) -> None:
        if (runners, seed) not in self._begun:
            answer, to = _SPAWN.Pipe(duplex=False)
            given = self._question, runners, seed, self._whole, to
            process = _SPAWN.Process(target=_answer, args=given, daemon=True)
            process.start()
            to.close()
            self._begun[runners, seed] = _Begun(process, answer)


class _Begun(NamedTuple):
    process: SpawnProcess
    answer: "Connection[None, Trial]"


def _answer(question: Question, runners: int, seed: int, whole: bool, to: "Connection[Trial, None]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who ends the search by ctrl-C wants to hear of it once
    try:
        trial = question.simulate(runners, seed, whole=whole)
    except Exception:
        return  # see `Ahead.simulate`
    to.send(trial)
