"""The costs of steps, prompt tokens and copies of pages, learned from finished iterations. Pure."""

from collections.abc import Iterable

from motet.domain import ParkMethod
from motet_runner.plan import Sequence, StepPlan, StepResult
from motet_runner.plan.presets import UNBOUNDED

_NEW_SHARE = 0.1
"""The weight of the newest iteration in an average"""
_NEW_SHARE_OF_COPIES = 0.2
_NEW_SHARE_OF_USUAL = 0.25

LEAST_BESIDE = 8
"""The fewest prompt tokens of an iteration beside decodes, however long they take: a prompt always progresses."""

_LEAST_PROMPT = 16
"""The time of fewer prompt tokens tells little about the time of one."""

_MOST_CHANGE = 2.0
"""An iteration changes a cost at most by the factor of this number's square root: a disturbance of one iteration must
not shrink the next prompts, and wrong figures are corrected within a few iterations."""

MIN_COUNTS, MIN_SPREAD = 4, 2.0
"""Numbers of decodes that have to be seen for a law, and how many times the least of them the most is, at least."""

_MOST_USEFUL = 4096
"""The least cost of a prompt token is the decodes' time divided by this: no lower figure is needed."""


class StepCosts:
    def __init__(
        self, *, prefill_seconds_per_token: float, swap_seconds_per_page: float, decode_slowdown: float | None = None
    ) -> None:
        """The arguments are measured at the start; later iterations change the figures. `decode_slowdown`: the longest
        time of an iteration, as a multiple of the time of its decodes alone."""
        self.step_seconds = 0.0
        """The time of a decode-only iteration"""
        self.prefill_seconds_per_token = prefill_seconds_per_token
        self.swap_seconds_per_page = swap_seconds_per_page
        self._slowdown = decode_slowdown
        self._decode_seconds: dict[int, float] = {}
        """Number of rows → the time of a decode-only iteration"""
        self._usual_rows = self._usual_seconds = 0.0
        """Of the latest decode-only iterations. More rows take no less: the time for one number of rows may come from a
        single iteration that was shorter by chance, and while prompts wait, no iteration corrects it. The difference
        would be charged to their tokens, of which so few would be taken that prompts starve."""
        self._nearest: dict[int, int] = {}
        """Number of rows → the nearest one in `_decode_seconds`, once it was asked for"""
        self._seconds_beside = prefill_seconds_per_token
        """The time of a prompt token beside decodes. This time differs from `prefill_seconds_per_token`: decodes and
        prompt share the reading of the weights, small pieces multiply less efficiently, and later pieces of a prompt
        attend to more tokens."""

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        if result.swapped_pages:
            per_page = result.swap_seconds / result.swapped_pages
            self.swap_seconds_per_page += _NEW_SHARE_OF_COPIES * (per_page - self.swap_seconds_per_page)
        decodes, prompt_tokens = len(plan.decodes), plan.prefill_tokens
        if result.retries or not decodes:
            self._learn_prefill(decodes, prompt_tokens, result.seconds)
            if decodes and not plan.prefills:
                self._learn_step(result.seconds)
        elif plan.prefills:
            self.learn_chunk(decodes, prompt_tokens, result.seconds)
        else:
            self.learn_decodes(decodes, (result.seconds,))

    def learn_decodes(self, decodes: int, each: Iterable[float]) -> None:
        """Learn from iterations of only `decodes` decodes, one after the other, for which memory sufficed."""
        known = self._decode_seconds
        if decodes not in known:
            self._nearest.clear()
        for seconds in each:
            known[decodes] = _towards(known.get(decodes, seconds), seconds)
            self._usual_rows += _NEW_SHARE_OF_USUAL * (decodes - self._usual_rows)
            self._usual_seconds = _towards(self._usual_seconds, seconds, _NEW_SHARE_OF_USUAL)
            self._learn_step(seconds)

    def learn_chunk(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """Learn from an iteration of decodes and prompt tokens, at least one of each, for which memory sufficed."""
        self._learn_beside(decodes, prompt_tokens, seconds)
        self._learn_prefill(decodes, prompt_tokens, seconds)

    def decode_law(self) -> tuple[float, float]:
        """The time of an iteration of decodes alone (PU-13): what it takes in any case, and for each of them, by least
        squares of the relative errors and without a negative part. Zeros: too few numbers of decodes were seen."""
        known = self._decode_seconds
        if len(known) < MIN_COUNTS or max(known) < MIN_SPREAD * min(known):
            return 0.0, 0.0
        weights = {rows: seconds**-2 for rows, seconds in known.items() if seconds > 0}
        total = sum(weights.values())
        mean_rows = sum(weight * rows for rows, weight in weights.items()) / total
        mean = sum(weight * known[rows] for rows, weight in weights.items()) / total
        spread = sum(weight * (rows - mean_rows) ** 2 for rows, weight in weights.items())
        slope = sum(weight * (rows - mean_rows) * (known[rows] - mean) for rows, weight in weights.items()) / spread
        each = min(max(0.0, slope), mean / mean_rows)
        return mean - each * mean_rows, each

    def cheaper_park(self, sequence: Sequence) -> ParkMethod:
        """Compares two copies of the sequence's pages with computing its tokens again."""
        swap = 2 * sequence.pages_of_kv * self.swap_seconds_per_page
        recompute = sequence.scheduled * self.prefill_seconds_per_token
        return ParkMethod.SWAP if swap < recompute else ParkMethod.RECOMPUTE

    def prompt_tokens_beside(self, decodes: int, prompts: int) -> int:
        """How many prompt tokens keep an iteration with `decodes` decodes within the slowdown.

        If more sequences wait for their first token than decode, prompts get proportionally more time: it is better to
        delay few sequences for many. Otherwise long decodes would keep prompts in small pieces for long. Before the
        first decode-only iteration, there is no limit.
        """
        alone = self._seconds_of(decodes)
        if alone is None or self._slowdown is None or self._seconds_beside <= 0:
            return UNBOUNDED
        seconds = alone * (self._slowdown - 1) * max(1.0, prompts / decodes)
        return max(LEAST_BESIDE, int(seconds / self._seconds_beside))

    def _learn_step(self, seconds: float) -> None:
        share = _NEW_SHARE if self.step_seconds else 1.0
        self.step_seconds += share * (seconds - self.step_seconds)

    def _learn_prefill(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        if prompt_tokens < _LEAST_PROMPT:
            return
        # Compare with the same number of decodes: with the time of more decodes, prompts would seem free.
        beside = self._seconds_of(decodes) if decodes else 0.0
        if beside is not None:
            per_token = max(0.0, seconds - beside) / prompt_tokens
            self.prefill_seconds_per_token += _NEW_SHARE * (per_token - self.prefill_seconds_per_token)

    def _learn_beside(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        alone = self._seconds_of(decodes)
        if alone is not None:
            seen = max((seconds - alone) / prompt_tokens, alone / _MOST_USEFUL)
            self._seconds_beside = _towards(self._seconds_beside, seen)

    def _seconds_of(self, decodes: int) -> float | None:
        """The time of an iteration with `decodes` decodes or, if unknown, with the nearest known number of decodes. At
        least the usual time, if it is at least the usual number."""
        known = self._decode_seconds
        if not known:
            return None
        if decodes not in self._nearest:
            self._nearest[decodes] = min(known, key=lambda rows: abs(rows - decodes))
        seconds = known[self._nearest[decodes]]
        return max(seconds, self._usual_seconds) if decodes >= self._usual_rows else seconds


def _towards(figure: float, seen: float, share: float = 0.5) -> float:
    """The figure after one more iteration. It changes by a bounded factor, see `_MOST_CHANGE`."""
    if figure <= 0 or seen <= 0:
        return max(figure, seen)
    factor: float = min(_MOST_CHANGE, max(1 / _MOST_CHANGE, seen / figure)) ** share
    return figure * factor
