"""How many sequences may decode at once, so that a token takes no longer than the pool's SLO says (S3-18). Pure.

The largest number whose forecast time per token keeps the target is found by binary search in the learned law. Until
enough iterations were seen there is no cap. At least one sequence runs, even if it alone is too slow.
"""

from bisect import bisect_right

from motet.runner_info import BatchCap
from motet_runner.plan.step_plan import StepPlan, StepResult
from motet_runner.plan.step_times import StepTimes, TimedStep

TOLERANCE = 0.02
"""The forecast may exceed the target by this share before the cap is lowered: else it would change with every fit."""

MAX_GROWTH = 2.0
"""The cap is at most this multiple of the sequences that were seen together, unless more are safe in any case: a law
that was learned from few sequences may be wrong for many."""


class SloCap:
    def __init__(self, target_seconds: float, places: int) -> None:
        self.target = target_seconds
        self.sequences = places
        """How many may run."""
        self._places = places
        self._times = StepTimes(target_seconds)
        self._adjusted = False

    def learn(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        """`seconds`: since the iteration before ended."""
        if not result.retries:
            self.learn_step(
                TimedStep(seconds, len(plan.decodes), plan.decodes.context, plan.prefill_tokens, len(plan.prefills))
            )

    def learn_step(self, step: TimedStep) -> None:
        if self._times.learn(step):
            self._adjust()

    def forget(self) -> None:
        """Other kernels compute from now on."""
        self._times.forget()

    def report(self) -> BatchCap:
        law = self._times.law
        if law is None:
            return BatchCap(target_seconds=self.target)
        return BatchCap(
            target_seconds=self.target,
            sequences=self.sequences,
            token_seconds=self._times.token_seconds(self.sequences),
            alone_seconds=self._times.token_seconds(1),
            fixed_seconds=law.fixed,
            sequence_seconds=law.decode,
            context_seconds=law.context,
            prompt_seconds=law.prompt,
        )

    def _adjust(self) -> None:
        times = self._times
        best = bisect_right(range(1, self._places + 1), self.target, key=times.token_seconds)
        seen = times.most_decodes
        safe = seen * max(MAX_GROWTH, self.target / times.token_seconds(seen))
        best = max(1, min(best, int(safe)))
        too_slow = times.token_seconds(self.sequences) > self.target * (1 + TOLERANCE)
        if best > self.sequences or too_slow or not self._adjusted:
            self.sequences, self._adjusted = best, True
