"""Simulates what a search will ask for next in processes of their own, while it waits for what it asks for now.

The search says what it expects. What it expects no longer is ended, and what was not needed is forgotten, so the answer
is the same as without.
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
    def __init__(self, question: Question, *, whole: bool, processes: int) -> None:
        """`whole`: as in `Question.simulate`. `processes`: how many simulations run at a time; 1: all run here."""
        self._question = question
        self._whole = whole
        self._processes = processes
        self._begun: dict[tuple[int, int], _Begun] = {}

    def simulate(self, runners: int, seed: int, *, then: Iterable[tuple[int, int]] = ()) -> Trial:
        """`then`: what is expected to be asked for next (runners and seed), the likeliest first."""
        asked = runners, seed
        expected = [asked, *then]
        if asked in self._begun or min(self._processes, len(expected)) > 1:
            self._end(one for one, begun in self._begun.items() if one not in expected and not begun.answer.poll())
            for one in expected:
                if sum(not begun.answer.poll() for begun in self._begun.values()) < self._processes:
                    self._begin(*one)
            try:
                trial: Trial = self._begun[asked].answer.recv()
            except EOFError:
                pass  # it has failed, such as for lack of memory: alone it may not, and if it does, here is told why
            else:
                return trial
        return self._question.simulate(runners, seed, whole=self._whole)

    def close(self) -> None:
        self._end(self._begun)

    def _end(self, simulations: Iterable[tuple[int, int]]) -> None:
        for one in tuple(simulations):
            begun = self._begun.pop(one)
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
