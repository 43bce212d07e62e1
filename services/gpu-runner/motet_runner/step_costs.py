"""What steps, prompt tokens and copies of pages cost, learned from finished iterations. Pure."""

from math import sqrt

from motet.domain import PAGE_TOKENS, ParkMethod
from motet_runner.plan import Sequence, StepPlan, StepResult
from motet_runner.plan.presets import UNBOUNDED

_NEW_SHARE = 0.1
"""How much of a figure the newest iteration decides."""
_NEW_SHARE_OF_COPIES = 0.2

LEAST_BESIDE = 8
"""Prompt tokens that an iteration takes beside decodes, whatever they cost: a prompt always goes on."""

_MOST_CHANGE = 2.0
"""One iteration changes a cost by at most the square root of two, however long it took: what disturbs a machine for an
iteration must not shrink the next prompts, and figures that are wrong are right again after a few iterations."""

_MOST_USEFUL = 4096
"""Prompt tokens that cost so little that all of these together cost no more than the decodes need no better figure."""


class StepCosts:
    def __init__(
        self, *, prefill_seconds_per_token: float, swap_seconds_per_page: float, decode_slowdown: float | None = None
    ) -> None:
        """First figures, measured at the start. They follow what is seen later. `decode_slowdown`: how many times as
        long as its decodes alone an iteration may take."""
        self.step_seconds = 0.0
        """An iteration that only decodes."""
        self.prefill_seconds_per_token = prefill_seconds_per_token
        self.swap_seconds_per_page = swap_seconds_per_page
        self._slowdown = decode_slowdown
        self._decode_seconds: dict[int, float] = {}
        """An iteration that only decodes, by its rows"""
        self._seconds_beside = prefill_seconds_per_token
        """A prompt token beside decodes. It differs from one alone: it shares the reading of the weights, small pieces
        multiply less well, and later pieces of a prompt attend to more tokens."""

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        if result.swapped_pages:
            per_page = result.swap_seconds / result.swapped_pages
            self.swap_seconds_per_page += _NEW_SHARE_OF_COPIES * (per_page - self.swap_seconds_per_page)
        decodes, prompt_tokens = len(plan.decodes), plan.prefill_tokens
        if decodes and not plan.prefills and not result.retries:
            self.learn_decodes(decodes, result.seconds)
            return
        if decodes and not result.retries:
            self._learn_beside(decodes, prompt_tokens, result.seconds)
        if prompt_tokens >= PAGE_TOKENS:
            # Not the usual iteration: it may have more rows that decode, and then prompts seem to cost nothing.
            beside = self._seconds_of(decodes) if decodes else 0.0
            if beside is not None:
                per_token = max(0.0, result.seconds - beside) / prompt_tokens
                self.prefill_seconds_per_token += _NEW_SHARE * (per_token - self.prefill_seconds_per_token)
        elif decodes and not plan.prefills:
            self._learn_step(result.seconds)

    def learn_decodes(self, decodes: int, seconds: float) -> None:
        """An iteration has computed nothing but `decodes` decodes, for which memory sufficed."""
        self._learn_beside(decodes, 0, seconds)
        self._learn_step(seconds)

    def cheaper_park(self, sequence: Sequence) -> ParkMethod:
        """Two copies of its pages, or computing its tokens again."""
        swap = 2 * len(sequence.pages) * self.swap_seconds_per_page
        recompute = sequence.scheduled * self.prefill_seconds_per_token
        return ParkMethod.SWAP if swap < recompute else ParkMethod.RECOMPUTE

    def prompt_tokens_beside(self, decodes: int, prompts: int) -> int:
        """How many prompt tokens keep an iteration with `decodes` decodes within the slowdown.

        Where more sequences wait for their first token than decode, they get the more time: delaying few for many is
        then the smaller delay, and decodes that go on for long would else keep prompts in small pieces for long.
        Before an iteration has only decoded, there is no limit.
        """
        alone = self._seconds_of(decodes)
        if alone is None or self._slowdown is None or self._seconds_beside <= 0:
            return UNBOUNDED
        seconds = alone * (self._slowdown - 1) * max(1.0, prompts / decodes)
        return max(LEAST_BESIDE, int(seconds / self._seconds_beside))

    def _learn_step(self, seconds: float) -> None:
        share = _NEW_SHARE if self.step_seconds else 1.0
        self.step_seconds += share * (seconds - self.step_seconds)

    def _learn_beside(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        if prompt_tokens == 0:
            self._decode_seconds[decodes] = _towards(self._decode_seconds.get(decodes, seconds), seconds)
            return
        alone = self._seconds_of(decodes)
        if alone is not None:
            seen = max((seconds - alone) / prompt_tokens, alone / _MOST_USEFUL)
            self._seconds_beside = _towards(self._seconds_beside, seen)

    def _seconds_of(self, decodes: int) -> float | None:
        """Of an iteration with `decodes` decodes. Without a figure for this number, that of the nearest one."""
        known = self._decode_seconds
        if decodes in known:
            return known[decodes]
        return known[min(known, key=lambda rows: abs(rows - decodes))] if known else None


def _towards(figure: float, seen: float) -> float:
    """The figure after one more iteration. The change is a factor with bounds, see `_MOST_CHANGE`."""
    if figure <= 0 or seen <= 0:
        return max(figure, seen)
    return figure * sqrt(min(_MOST_CHANGE, max(1 / _MOST_CHANGE, seen / figure)))
