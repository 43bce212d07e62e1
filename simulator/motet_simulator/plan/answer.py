"""One request of a simulated gateway, and what has become of its answer."""

from collections.abc import Iterable
from dataclasses import dataclass

from motet.domain import BASE, Digest, RequestId
from motet_scheduler.policy.values import Estimate, Promise
from motet_simulator.plan.engine_tokens import EOS
from motet_simulator.plan.gaps import Gaps
from motet_simulator.workloads.request import WorkloadRequest


@dataclass(slots=True, eq=False)
class Answer:
    request: RequestId
    asked: WorkloadRequest
    name: int
    """The token that it consists of."""
    max_tokens: int
    estimate: Estimate
    end_length: int
    """Tokens of prompt and answer, once it has ended."""
    length: int
    """Tokens of the prompt, and those of the answer so far."""
    prompt: tuple[int, ...] = ()
    digest: Digest = BASE
    salt: bytes = b""
    """Who may share the pages of its prompt; empty: nobody."""
    epoch: int = 0
    promise: Promise | None = None
    weight: int = 1
    """Of its tenant."""
    placed_at: float = -1.0
    first_at: float = -1.0
    last_at: float = -1.0
    """When the engine had its newest token."""
    ended: bool = False
    moved: bool = False
    """It has had no token yet from the runner to which it has moved."""
    refusal: str = ""
    """Why it was refused; empty if it was not."""

    @property
    def left(self) -> int:
        """Tokens that it still gets."""
        return self.end_length - self.length

    @property
    def delivered(self) -> int:
        return self.length - self.asked.prompt_tokens

    def token_after(self, length: int) -> int:
        """The token that makes it `length` tokens long."""
        return EOS if length >= self.end_length else self.name

    def token(self, now: float, gaps: Gaps) -> None:
        if self.first_at < 0:
            self.first_at = now
        else:
            gaps.add(now - self.last_at)
            if self.moved:
                self.moved = False
                gaps.of_moves.append(now - self.last_at)
        self.last_at = now
        self.length += 1

    def leapt(self, tokens: int, now: float) -> None:
        """This number of tokens has come; the last one now. Their gaps are counted elsewhere."""
        self.length += tokens
        self.last_at = now


def token_of_each(answers: Iterable[Answer], now: float, gaps: Gaps) -> None:
    """`Answer.token` of all, in a fraction of the time: mostly their last ones came at the same time."""
    counts: dict[float, int] = {}
    for answer in answers:
        if answer.first_at < 0 or answer.moved:
            answer.token(now, gaps)
            continue
        counts[answer.last_at] = counts.get(answer.last_at, 0) + 1
        answer.last_at = now
        answer.length += 1
    for last_at, count in counts.items():
        gaps.add(now - last_at, count)
