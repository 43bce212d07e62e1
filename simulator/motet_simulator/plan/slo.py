"""What is promised to clients: a time to the first token and a time per token, which most requests must meet."""

import math
import re
from dataclasses import dataclass

from motet.errors import SetupError
from motet_simulator.lines import MAX_NUMBER
from motet_simulator.plan.outcome import Outcome
from motet_simulator.quantiles import quantile

_TIME = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>ms|s)")
_NAMES = ("ttft", "tpot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Seconds; None: nothing is promised."""

    ttft: float | None = None
    """To the first token."""
    tpot: float | None = None
    """Per further token, as the mean of an answer."""
    share: float = 0.95
    """Of the requests, which must meet each. One that was refused misses both."""

    @classmethod
    def parse(cls, text: str, *, percent: float = 95) -> "Slo":
        """Such as `ttft=500ms,tpot=50ms`. Raises SetupError."""
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (one.strip() for one in part.partition("="))
            time = _TIME.fullmatch(value)
            if name not in _NAMES or name in found or time is None or not 0 < float(time["number"]) <= MAX_NUMBER:
                raise SetupError(
                    f"--slo {text!r}: write it as ttft=500ms,tpot=50ms, or one of the two, each with ms or s."
                )
            found[name] = float(time["number"]) / (1000 if time["unit"] == "ms" else 1)
        if not 0 < percent < 100:
            raise SetupError(f"--percent {percent:g}: a share of the requests, above 0 and below 100.")
        return cls(**found, share=percent / 100)

    def limits(self) -> dict[str, float]:
        named = {"ttft": self.ttft, "tpot": self.tpot}
        return {name: limit for name, limit in named.items() if limit is not None}

    def seen(self, outcome: Outcome) -> dict[str, float]:
        """The quantile of each that is promised. All are infinite if too many of the requests were refused."""
        times = {"ttft": outcome.first_tokens, "tpot": outcome.per_token}
        answered = len(outcome.first_tokens) / outcome.requests if outcome.requests else 1.0
        if answered < self.share:
            return dict.fromkeys(self.limits(), math.inf)
        return {name: quantile(times[name], self.share / answered) for name in self.limits()}

    def misses(self, outcome: Outcome) -> dict[str, float]:
        """By which factor each promise is missed; those that are kept are not in it."""
        seen = self.seen(outcome)
        return {name: seen[name] / limit for name, limit in self.limits().items() if seen[name] > limit}


def shown(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
