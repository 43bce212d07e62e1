"""What steps, prompt tokens and copies of pages cost, learned from finished iterations. Pure."""

from motet.domain import PAGE_TOKENS, ParkMethod
from motet_runner.plan import Sequence, StepPlan, StepResult

_NEW_SHARE = 0.1
"""How much of a figure the newest iteration decides."""
_NEW_SHARE_OF_COPIES = 0.2


class StepCosts:
    def __init__(self, *, prefill_seconds_per_token: float, swap_seconds_per_page: float) -> None:
        """First figures, measured at the start. They follow what is seen later."""
        self.step_seconds = 0.0
        """An iteration that only decodes."""
        self.prefill_seconds_per_token = prefill_seconds_per_token
        self.swap_seconds_per_page = swap_seconds_per_page

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        if result.swapped_pages:
            per_page = result.swap_seconds / result.swapped_pages
            self.swap_seconds_per_page += _NEW_SHARE_OF_COPIES * (per_page - self.swap_seconds_per_page)
        if plan.prefill_tokens >= PAGE_TOKENS:
            beside = self.step_seconds if plan.decodes else 0.0
            per_token = max(0.0, result.seconds - beside) / plan.prefill_tokens
            self.prefill_seconds_per_token += _NEW_SHARE * (per_token - self.prefill_seconds_per_token)
        elif plan.decodes and not plan.prefills:
            share = _NEW_SHARE if self.step_seconds else 1.0
            self.step_seconds += share * (result.seconds - self.step_seconds)

    def cheaper_park(self, sequence: Sequence) -> ParkMethod:
        """Two copies of its pages, or computing its tokens again."""
        swap = 2 * len(sequence.pages) * self.swap_seconds_per_page
        recompute = sequence.scheduled * self.prefill_seconds_per_token
        return ParkMethod.SWAP if swap < recompute else ParkMethod.RECOMPUTE
