"""Ways of choosing a runner with which production's is compared. They serve benchmarks alone.

Each has its own order of the runners, and takes the first one where a request fits by production's own checks. A
simulated cluster asks it in place of production (`simulate`).
"""

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from unittest.mock import patch

from motet.domain import BASE, Digest, InstanceName, RequestId
from motet_scheduler.policy.headroom import NOTHING_KEPT, KeptFrom
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runner_choice import Chosen, NeverFits, choose
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import SchedulerConfig
from motet_simulator.plan.answer import Answer
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.outcome import Outcome
from motet_simulator.plan.setup import Setup
from motet_simulator.workloads.request import WorkloadRequest


class Production:
    """As the scheduler decides."""

    def __init__(self) -> None:
        self.cold = 0
        """Requests whose adapter was neither on the device of their runner nor on its way there."""
        self.answers: dict[RequestId, Answer] = {}
        """Of the simulated cluster: those that have not ended."""

    def __call__(
        self,
        request: Request,
        runners: Iterable[Runner],
        config: SchedulerConfig,
        now: float,
        *,
        near: str = "",
        reserved: Collection[Runner] = (),
        kept: KeptFrom = NOTHING_KEPT,
    ) -> Chosen | NeverFits | None:
        found: Chosen | NeverFits | None = None
        for able in self.in_order(request, list(runners)):
            found = choose(request, able, config, now, near=near, reserved=reserved, kept=kept)
            if isinstance(found, Chosen):
                self.cold += request.digest != BASE and request.digest not in found.runner.adapters.having
                self.chosen(request, found.runner)
                return found
        return found

    def in_order(self, request: Request, runners: list[Runner]) -> Iterator[list[Runner]]:  # noqa: ARG002
        """Production chooses from the first of these where the request fits on any."""
        yield runners

    def chosen(self, request: Request, runner: Runner) -> None:
        """The request is about to be placed there."""


class Fullest(Production):
    """The fullest runner, and of equally full ones the one that has the adapter."""

    def in_order(self, request: Request, runners: list[Runner]) -> Iterator[list[Runner]]:
        digest = request.digest
        for runner in sorted(
            runners, key=lambda one: (one.sequences, one.adapters.tier_of(digest), one.instance), reverse=True
        ):
            yield [runner]


class ShortestQueue(Production):
    """The runner with the fewest prompt tokens that are not computed, plus sequences (JSQ)."""

    def __init__(self) -> None:
        super().__init__()
        self._prompts: defaultdict[InstanceName, dict[RequestId, int]] = defaultdict(dict)
        """Tokens of each that had no token of its answer yet."""

    def in_order(self, request: Request, runners: list[Runner]) -> Iterator[list[Runner]]:  # noqa: ARG002
        for runner in sorted(runners, key=lambda one: (self._pending(one.instance) + one.sequences, one.instance)):
            yield [runner]

    def chosen(self, request: Request, runner: Runner) -> None:
        self._prompts[runner.instance][request.id] = request.prompt_tokens

    def _pending(self, instance: InstanceName) -> int:
        prompts, answers = self._prompts[instance], self.answers
        for name in [name for name in prompts if name not in answers or answers[name].first_at >= 0]:
            del prompts[name]
        return sum(prompts.values())


class Random(Production):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._chance = random.Random(seed)

    def in_order(self, request: Request, runners: list[Runner]) -> Iterator[list[Runner]]:  # noqa: ARG002
        for runner in self._chance.sample(runners, len(runners)):
            yield [runner]


class SameAdapterFcfs(Production):
    """A batch has consecutive requests for one adapter, as those serve that cannot mix adapters."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[InstanceName, Digest] | None = None
        self._next: int | None = None
        """In the order in which they came: production's queue also offers the first for each other adapter."""

    def in_order(self, request: Request, runners: list[Runner]) -> Iterator[list[Runner]]:
        if self._next is None or request.sequence <= self._next:
            yield [one for one in runners if not one.sequences or (one.instance, request.digest) == self._last]

    def chosen(self, request: Request, runner: Runner) -> None:
        self._last = runner.instance, request.digest
        self._next = max(self._next or 0, request.sequence + 1)


class SameAdapter(Production):
    """A batch has requests for one adapter, which may pass those for others."""

    def in_order(self, request: Request, runners: list[Runner]) -> Iterator[list[Runner]]:
        yield [one for one in runners if not one.sequences or one.adapters_running == {request.digest}]


def simulate(
    setup: Setup,
    requests: Iterable[WorkloadRequest],
    placement: Production,
    adapters: Iterable[str] = (),
    *,
    look: Callable[[Cluster], bool] | None = None,
) -> Outcome:
    """Play a workload with this way of placing it. `look` is called every ten seconds; True ends the simulation."""
    cluster = Cluster(setup, adapters)
    placement.answers = cluster.answers
    with patch("motet_scheduler.policy.placement.choose", placement):
        return cluster.run(iter(requests), give_up=(lambda: look(cluster)) if look is not None else None)
