"""Random histories of requests whose rows are changed, and what each of their iterations must draw from."""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from motet_runner.external.vllm.driven import Ask, Penalties, Produced
from motet_runner.external.vllm.row_changes import RowChanges

ROWS, VOCABULARY, LENGTH = 6, 203, 64


@dataclass
class Request:
    ask: Ask
    extra_args: dict[str, object] | None
    repetition: float
    tokens: list[int]
    allowed: frozenset[int] = frozenset()

    def expected(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """What this row draws from"""
        found = self.repeated(logits).astype(np.float64)
        prompt = len(self.ask.tokens) - self.ask.output_tokens
        presence, frequency = self.ask.penalties
        for token, times in Counter(self.tokens[prompt:]).items():
            found[token] -= presence + times * frequency
        if self.ask.masked:
            found[[token for token in range(VOCABULARY) if token not in self.allowed]] = -np.inf
        return found.astype(np.float32)

    def repeated(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """vLLM's part: the repetition penalty, also of the prompt"""
        found = logits.copy()
        seen = sorted(set(self.tokens))
        found[seen] = np.where(found[seen] > 0, found[seen] / self.repetition, found[seen] * self.repetition)
        return found


@dataclass
class History:
    """Requests come, get tokens, end and are aborted. A place is given again at once, as vLLM does it."""

    seed: int
    changes: RowChanges = field(default_factory=lambda: RowChanges(ROWS, VOCABULARY, LENGTH))
    running: dict[int, Request] = field(default_factory=dict)
    """By place"""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.names = 0

    def change(self) -> tuple[list[int], list[int]]:
        """Some leave, and some come → the places that lost their requests, and those that got one."""
        leave = [place for place in self.running if self.random.random() < 0.2]
        for place in leave:
            self.changes.end([self.running.pop(place).ask.name])
        free = [place for place in range(ROWS) if place not in self.running]
        come = [place for place in free if self.random.random() < 0.5]
        for place in come:
            self.running[place] = self._begun()
        return leave, come

    def allow(self) -> None:
        for one in self.running.values():
            if one.ask.masked:
                one.allowed = frozenset(self.random.sample(range(VOCABULARY), self.random.randint(1, 40)))
                bits = sum(1 << token for token in one.allowed)
                whole = bits.to_bytes((VOCABULARY + 7) // 8, "little")
                self.changes.allow(one.ask.name, whole.rstrip(b"\0") if self.random.random() < 0.5 else whole)

    def logits(self) -> npt.NDArray[np.float32]:
        return np.random.default_rng(self.random.randrange(1 << 30)).normal(0, 3, (ROWS, VOCABULARY)).astype(np.float32)

    def draw(self) -> None:
        """Each gets a token: often one that it has."""
        produced = []
        for one in self.running.values():
            one.tokens.append(self.random.choice([*one.tokens, self.random.randrange(VOCABULARY)]))
            produced.append(Produced(one.ask.name, one.tokens[-1], None, ended=False))
        self.changes.take(produced)

    def _begun(self) -> Request:
        self.names += 1
        tokens = [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(2, 20))]
        penalties = Penalties(*self.random.choice([(0.0, 0.0), (0.5, 0.0), (0.0, -0.3), (2.0, 0.7)]))
        ask = Ask(
            str(self.names),
            tuple(tokens),
            {},
            0,
            "",
            masked=self.random.random() < 0.5,
            penalties=penalties,
            output_tokens=self.random.randrange(len(tokens)),
        )
        return Request(ask, self.changes.begin(ask), self.random.choice([1.0, 1.3, 0.7]), tokens)
