"""What a simulated workload has seen: times to the first token, times between tokens, refusals."""

from collections import Counter
from dataclasses import dataclass, field

from motet_simulator.plan.answer import Answer
from motet_simulator.plan.gaps import Gaps


@dataclass(slots=True)
class Outcome:
    first_tokens: list[float] = field(default_factory=list)
    """Seconds from each request to its first token, as its gateway measures them."""
    per_token: list[float] = field(default_factory=list)
    """Seconds between two tokens, as the mean of each answer with two or more."""
    gaps: Gaps = field(default_factory=Gaps)
    """Seconds between two tokens, of all."""
    waits: list[float] = field(default_factory=list)
    """Seconds from each request to its placement."""
    refusals: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    """Until the last answer had ended."""
    busy_seconds: tuple[float, ...] = field(default=(), compare=False)
    """Of each runner: the time in which it had iterations."""

    @property
    def requests(self) -> int:
        return len(self.first_tokens) + self.refusals.total()

    def ended(self, answer: Answer, delivery_seconds: float) -> None:
        asked, output = answer.asked, answer.delivered
        self.first_tokens.append(answer.first_at + delivery_seconds - asked.at)
        self.waits.append(answer.placed_at - asked.at)
        if output > 1:
            self.per_token.append((answer.last_at - answer.first_at) / (output - 1))
        self.prompt_tokens += asked.prompt_tokens
        self.output_tokens += output

    def refused(self, answer: Answer) -> None:
        self.refusals[answer.refusal] += 1
