"""Which version of the predictor serves, and when another one takes its place. Pure: no clock, no I/O.

What a refit makes is a candidate: it estimates each answer in shadow, and serves once a comparison has shown that it is
better (see `comparison`). The version that served before stays in shadow, and serves again if the same comparison shows
that it is better. So there are three at most."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from motet_predictor.comparison import Comparison, Gain, Verdict
from motet_predictor.prompt_version import PromptVersion


class Role(Enum):
    SERVING = "serving"
    FORMER = "former"
    CANDIDATE = "candidate"
    RETIRED = "retired"


class Why(Enum):
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled back"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Change:
    """That another version serves now; or that a candidate never will (`REJECTED`)."""

    why: Why
    version: PromptVersion
    gain: Gain
    answers: int
    """By how many it was decided"""

    def __str__(self) -> str:
        return (
            f"{self.why.value} after {self.answers} answers: loss lower by {self.gain.mean:.4f} ± {self.gain.error:.4f}"
        )


class Versions:
    def __init__(self, serving: PromptVersion) -> None:
        self.serving = serving
        self.former: PromptVersion | None = None
        self.candidate: PromptVersion | None = None
        self._of_former = Comparison()
        self._of_candidate = Comparison()

    def __iter__(self) -> Iterator[PromptVersion]:
        return iter([one for one in (self.serving, self.former, self.candidate) if one is not None])

    def role_of(self, name: str) -> Role:
        for version, role in ((self.serving, Role.SERVING), (self.former, Role.FORMER)):
            if version is not None and version.name == name:
                return role
        return Role.CANDIDATE if self.candidate is not None and self.candidate.name == name else Role.RETIRED

    def comparison_of(self, version: PromptVersion) -> Comparison | None:
        """With the serving one, of a version that estimates in shadow."""
        if version is self.serving:
            return None
        return self._of_former if version is self.former else self._of_candidate

    def resume(self, version: PromptVersion, comparison: Comparison) -> None:
        """Go on with a comparison of one that estimates in shadow, which an earlier process has begun."""
        if version is self.former:
            self._of_former = comparison
        elif version is self.candidate:
            self._of_candidate = comparison

    def offer(self, candidate: PromptVersion) -> None:
        """Let a version estimate in shadow, in the place of the candidate before it."""
        self.candidate, self._of_candidate = candidate, Comparison()

    def serve(self, version: PromptVersion) -> None:
        """Let a version serve from now on. The one that serves now becomes the former one."""
        if version is self.serving:
            return
        if version is self.candidate:
            self.candidate = None
        self.serving, self.former = version, self.serving
        # Both were compared with the version that served until now.
        self._of_former, self._of_candidate = Comparison(), Comparison()

    def judge(self, tenant: str, prompt: int, losses: list[float]) -> Change | None:
        """Compare those in shadow with the serving one by an answer. `losses`: of each version, in their order;
        `prompt`: a number for its text, 0 if it is not known."""
        mine, *others = losses
        if self.former is not None:
            verdict = self._of_former.observe(tenant, prompt, others.pop(0), mine)
            if verdict is Verdict.BETTER:
                return self._serve(Why.ROLLED_BACK, self.former, self._of_former)
            if verdict is not None:  # it stays: later answers may be others
                self._of_former = Comparison()
        if self.candidate is not None:
            verdict = self._of_candidate.observe(tenant, prompt, others.pop(0), mine)
            if verdict is Verdict.BETTER:
                return self._serve(Why.PROMOTED, self.candidate, self._of_candidate)
            if verdict is not None:
                change = _change(Why.REJECTED, self.candidate, self._of_candidate)
                self.candidate = None
                return change
        return None

    def _serve(self, why: Why, version: PromptVersion, comparison: Comparison) -> Change:
        change = _change(why, version, comparison)
        self.serve(version)
        return change


def _change(why: Why, version: PromptVersion, comparison: Comparison) -> Change:
    change = Change(why, version, comparison.gain(), comparison.answers)
    version.decision = str(change)
    return change
