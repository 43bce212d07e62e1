"""What a token of a prompt and one of an answer cost in the shares of tenants.

Runners measure how long each takes: of a full batch, the part of an iteration that one sequence has, and a token of a
prompt. The median over the runners of a group counts, so no single one decides. As long as none has measured it, the
setting does (`output_token_cost`).

Both change, so that their sum stays: a request of usual size costs about as much as before, whatever was measured. They
change slowly, and only for what is placed from then on: no counter jumps, and what was charged before is settled by the
costs that it was charged by.
"""

from collections.abc import Collection
from math import inf
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet_scheduler.policy.runners import Runner

LEAST, MOST = 1.0, 16.0
"""The bounds of the measured cost of a token of an answer, if one of a prompt costs 1."""

LOOK_EVERY = 10.0
"""Seconds. There may be a thousand runners."""

MAX_CHANGE = 1.1
"""The factor by which the ratio of the two changes at a look, at most."""


class TokenCosts:
    __slots__ = ("_look_at", "_ratio", "_unmeasured", "answer", "prompt")

    def __init__(self, unmeasured: float) -> None:
        """`unmeasured`: the cost of a token of an answer, as long as no runner has measured it."""
        self._unmeasured = self._ratio = unmeasured
        self._look_at = -inf
        self.prompt, self.answer = 1.0, unmeasured

    def look(self, runners: "Collection[Runner]", now: float) -> None:
        """At what the runners of the group have measured."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY
        costs = [one.profile.answer_cost(max(1, one.max_sequences)) for one in runners if one.profile.sequence > 0]
        known = [cost for cost in costs if cost > 0]
        wanted = min(max(median(known), LEAST), MOST) if known else self._unmeasured
        self._ratio *= min(max(wanted / self._ratio, 1 / MAX_CHANGE), MAX_CHANGE)
        self.prompt = (1 + self._unmeasured) / (1 + self._ratio)
        self.answer = self._ratio * self.prompt
