"""Up to where a runner is filled as long as another one takes the request (PU-12). Pure.

| beyond  | when                                                                                                   |
|---------|--------------------------------------------------------------------------------------------------------|
| knee    | of its sequences, one more costs more than it gives (PU-13, `step_profile.py`)                         |
| gap     | with the contexts that it has, a token would take longer than its pool's SLO says (S3-18)              |
| prompts | it has prompts to compute for `MAX_PROMPT_SECONDS`                                                     |

Nobody waits for these: where all runners with room are beyond one, a request goes to the emptiest of them. What keeps
requests waiting are the places of a runner, and among them its cap on the batch, which holds for contexts of usual
length. What a runner has not measured is no limit, but for its iterations: those of its pool's other runners count.
"""

from math import inf
from typing import NamedTuple

from motet.runner_info import BatchCap
from motet.value import value
from motet_scheduler.policy.step_profile import StepProfile

MAX_PROMPT_SECONDS = 0.5
"""By the time of a prompt's tokens alone. Beside decodes they take about four times as long, and the next request would
wait for its first token meanwhile."""

LEAST_KNEE_ONE_IN = 8
"""A knee counts as at least one place in this number: figures of few sequences vary from runner to runner."""


class Beyond(NamedTuple):
    """The limit of a runner that a request would exceed."""

    words: str
    number: float

    def __str__(self) -> str:
        return self.words.format(self.number)


KNEE = "more than {0:.0f} requests at once cost it more time than they save"
GAP = "a token would take {0:.0f} ms there, longer than its pool's SLO"
PROMPTS = "it has {0:.0f} tokens of prompts to compute"


@value()
class FillLimits:
    """Of one runner."""

    sequences: float
    prompt_tokens: float
    law: BatchCap | None
    """Of the time of an iteration, with the target. None: its pool has none, or nothing was measured."""

    def beyond(
        self, sequences: int, context: int, prompt_tokens: int, request_tokens: int, *, by_target: bool = False
    ) -> Beyond | None:
        """What a request of `request_tokens` exceeds, on a runner that has these. None: nothing. `by_target`: its knee
        counts only if there is no target."""
        if sequences >= self.sequences and not (by_target and self.law is not None):
            return Beyond(KNEE, self.sequences)
        if prompt_tokens > self.prompt_tokens:
            return Beyond(PROMPTS, prompt_tokens)
        if (law := self.law) is not None and sequences:
            work = law.sequence_seconds * (sequences + 1) + law.context_seconds * (context + request_tokens)
            if law.fixed_seconds + work > law.target_seconds:
                return Beyond(GAP, 1e3 * (law.fixed_seconds + work))
        return None


def fill_limits(profile: StepProfile, cap: BatchCap | None, places: int) -> FillLimits | None:
    """Of a runner with `places`. None: nothing was measured."""
    sequences = max(profile.knee, places / LEAST_KNEE_ONE_IN)
    prompt_tokens = MAX_PROMPT_SECONDS / profile.prompt_token if profile.prompt_token > 0 else inf
    law = cap if cap is not None and cap.sequences else None
    if sequences == prompt_tokens == inf and law is None:
        return None
    return FillLimits(sequences, prompt_tokens, law)
