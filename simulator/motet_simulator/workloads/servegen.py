"""ServeGen's clients: each with its own rate in each hour, its own law of arrivals and its own lengths.

Two files of that publication: rates and laws by client and hour, and quantiles of lengths by client. A client without
lengths in them is left out. Requests are drawn client by client and merged by time, so memory holds the two tables and
one request of each client.
"""

import heapq
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from motet.errors import SetupError
from motet_simulator.lines import MAX_TOKENS, Row, csv_with, json_object, numbered_lines
from motet_simulator.workloads.request import WorkloadRequest

LEVELS = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1)
"""Of the quantiles of lengths."""

_COLUMNS = {"model", "client", "hour", "rate_per_s", "pattern", "p1"}

MAX_CLIENT_HOURS = 1_000_000
MIN_RATE, MIN_SHAPE = 1e-9, 0.01
"""Of a client's arrivals. With smaller ones the laws of gaps leave what a float can be."""

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class _Arrivals:
    rate: float
    pattern: str
    shape: float

    def gap(self, chance: random.Random) -> float:
        """Seconds to the next request: with the mean of the rate, and the spread of the law."""
        if self.pattern == "Gamma":
            return chance.gammavariate(self.shape, 1 / (self.shape * self.rate))
        if self.pattern == "Weibull":
            return chance.weibullvariate(1 / (self.rate * math.gamma(1 + 1 / self.shape)), self.shape)
        return chance.expovariate(self.rate)


@dataclass(slots=True)
class _Client:
    hours: dict[int, _Arrivals] = field(default_factory=dict)
    prompts: Sequence[float] = ()
    answers: Sequence[float] = ()


def servegen(
    hours_file: Path,
    lengths_file: Path,
    *,
    model: str,
    first_hour: int = 0,
    hours: int = 24,
    rate_factor: float = 1.0,
    seed: int = 0,
) -> Iterator[WorkloadRequest]:
    """`rate_factor`: times each client's rate. Raises SetupError where no client of this model asks in these hours."""
    wanted = range(first_hour, first_hour + hours)
    clients = _clients(hours_file, lengths_file, model, wanted)
    streams = [
        _requests(name, client, wanted, rate_factor, random.Random(f"{seed} {model} {name}"))
        for name, client in sorted(clients.items())
    ]
    return heapq.merge(*streams, key=lambda request: request.at)


def _requests(
    name: int, client: _Client, hours: range, rate_factor: float, chance: random.Random
) -> Iterator[WorkloadRequest]:
    for number, hour in enumerate(hours):
        arrivals = client.hours.get(hour)
        if arrivals is None:
            continue
        thinned = _Arrivals(arrivals.rate * rate_factor, arrivals.pattern, arrivals.shape)
        at, end = number * HOUR + thinned.gap(chance) * chance.random(), (number + 1) * HOUR
        while at < end:
            yield WorkloadRequest(
                at=at,
                prompt_tokens=_drawn(client.prompts, chance),
                output_tokens=_drawn(client.answers, chance),
                tenant=f"client-{name}",
            )
            at += thinned.gap(chance)


def _drawn(quantiles: Sequence[float], chance: random.Random) -> int:
    level = chance.random()
    place = min(bisect_right(LEVELS, level), len(LEVELS) - 1)
    low, high = LEVELS[place - 1], LEVELS[place]
    below, above = quantiles[place - 1], quantiles[place]
    return max(1, round(below + (above - below) * (level - low) / (high - low)))


def _clients(hours_file: Path, lengths_file: Path, model: str, wanted: range) -> dict[int, _Client]:
    clients: dict[int, _Client] = {}
    models: set[str] = set()
    for count, row in enumerate(csv_with(hours_file, _COLUMNS)):
        if count == MAX_CLIENT_HOURS:
            raise row.bad(f"there may be {MAX_CLIENT_HOURS:,} hours of clients at most")
        of_model = row.text("model")
        if len(models) < 100:
            models.add(of_model)
        hour = row.tokens("hour", least=0)
        if of_model != model or hour not in wanted:
            continue
        rate, shape = row.number("rate_per_s"), row.number("p1")
        if rate < MIN_RATE or (shape < MIN_SHAPE and row.text("pattern") in ("Gamma", "Weibull")):
            raise row.bad(f"a rate must be at least {MIN_RATE:g}, and a shape {MIN_SHAPE:g}")
        client = clients.setdefault(row.tokens("client", least=0), _Client())
        client.hours[hour] = _Arrivals(rate, row.text("pattern"), shape)
    for number, line in numbered_lines(lengths_file):
        row = Row(lengths_file, number, json_object(lengths_file, number, line))
        found = clients.get(row.tokens("client", least=0)) if row.text("model") == model else None
        if found is None:
            continue
        quantiles = row.get("quantiles")
        if not isinstance(quantiles, list) or len(quantiles) != len(LEVELS) or not _ascending(quantiles):
            raise row.bad(f"quantiles must be {len(LEVELS)} numbers from 0 to {MAX_TOKENS} that do not fall")
        if row.text("field") == "input_tokens":
            found.prompts = quantiles
        elif row.text("field") == "output_tokens":
            found.answers = quantiles
    whole = {name: client for name, client in clients.items() if client.prompts and client.answers}
    if not whole:
        raise SetupError(
            f"{hours_file} and {lengths_file} have no client of {model!r} in these hours. "
            f"There is {', '.join(sorted(models))}."
        )
    return whole


def _ascending(values: Sequence[object]) -> bool:
    numbers: Mapping[int, float] = {
        place: value
        for place, value in enumerate(values)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS
    }
    return len(numbers) == len(values) and all(numbers[place] <= numbers[place + 1] for place in range(len(values) - 1))
