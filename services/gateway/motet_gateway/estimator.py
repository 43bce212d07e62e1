"""Estimates the length of an answer: by the predictor within a budget, else by own statistics, else by max_tokens.

While the predictor is down, requests skip it without waiting, and a probe checks whether it is back. Requests that
arrive during one call share the next one.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

import structlog

from motet.api.v1 import common_pb2, predictor_pb2
from motet.errors import SetupError
from motet.length_statistics import LengthStatistics, quantiles_of
from motet.promises import LENGTH_OF_MAX_TOKENS
from motet.room_per_tenant import RoomPerTenant
from motet.transport import CallFailed, Channel, Network, StatusCode
from motet.transport.methods import OBSERVE, PREDICT
from motet_gateway.errors import forget_frames
from motet_gateway.metrics import Metrics

log = structlog.get_logger(__name__)

MIN_ANSWERS = 5
"""Five answers of a tenant's adapter already estimate better than max_tokens (S3-03)."""

KEPT_STATISTICS = 4096
KEPT_OUTCOMES = 10_000
PROMPTS_AT_ONCE = 16
"""In one call. Each costs the predictor a tenth of a millisecond. Neither many requests that arrive together nor one
with many prompts may make a call so long that it counts as failed, also where the budget is 5 ms, as in a cluster."""
OUTCOMES_AT_ONCE = 64
"""In one call. Each costs the predictor half a millisecond. When it was away, all gateways send what they have kept at
the same time: then it learns a part of each call, and says how many."""
OBSERVE_TIMEOUT_SECONDS = 5.0
"""Much longer than a busy predictor takes."""
FLUSH_SECONDS = 0.2
PROBE_SECONDS = 0.2
PROBE_TIMEOUT_SECONDS = 0.5

TENANT = "tenant"


class LocalLengths:
    """The gateway's own running statistics, for the adapters used last."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[str, str], LengthStatistics] = OrderedDict()

    def observe(self, tenant: str, adapter: str, tokens: int, *, censored: bool) -> None:
        statistics = self._of.setdefault((tenant, adapter), LengthStatistics())
        self._of.move_to_end((tenant, adapter))
        statistics.observe(tokens, censored=censored)
        if len(self._of) > KEPT_STATISTICS:
            self._of.popitem(last=False)

    def estimate(self, tenant: str, adapter: str, max_tokens: int) -> common_pb2.Estimate:
        statistics = self._of.get((tenant, adapter))
        shares = statistics.bucket_shares() if statistics is not None and statistics.count >= MIN_ANSWERS else None
        if shares is not None:
            q50, q80, q90, q95 = (min(tokens, max_tokens) for tokens in quantiles_of(shares, (0.5, 0.8, 0.9, 0.95)))
            return common_pb2.Estimate(q50=q50, q80=q80, q90=q90, q95=q95, rank=q50, source=TENANT)
        return longest(max_tokens)


def scope_name(adapter: str, base_digest: str) -> str:
    """What the predictor and our own statistics know the model by: the adapter's name, or the base model's digest. A
    tenant may ask several base models, which answer at different lengths."""
    return adapter or base_digest


def scope_tenant(tenant: str, uid: str) -> str:
    """What the predictor and our own statistics know the tenant by. A namespace that is made again under its name may
    have another owner, so it begins with lengths of its own. `uid`: of the namespace, empty if it is not known."""
    return f"{tenant}@{uid}" if uid else tenant


def longest(tokens: int) -> common_pb2.Estimate:
    """The estimate of an answer that may have all tokens that its client lets it have, or surely has them."""
    return common_pb2.Estimate(q50=tokens, q80=tokens, q90=tokens, q95=tokens, rank=tokens, source=LENGTH_OF_MAX_TOKENS)


class NoEstimate(Exception):
    """The predictor cannot be asked, or its answer has no use."""


@dataclass(slots=True)
class _PendingEstimate:
    prompts: Sequence[predictor_pb2.Prompt]
    answer: asyncio.Future[Sequence[common_pb2.Estimate]]


class Estimator:
    def __init__(
        self, address: str, metrics: Metrics, *, network: Network, budget_seconds: float, time_scale: float = 1.0
    ) -> None:
        self._address = address
        self._metrics = metrics
        self._network = network
        self._budget = budget_seconds
        self._pause = PROBE_SECONDS * time_scale
        self._local = LocalLengths()
        self._channel: Channel | None = None
        self._up = False
        self._went_down = asyncio.Event()
        self._waiting: deque[_PendingEstimate] = deque()
        self._flight: asyncio.Task[None] | None = None
        self._outcomes = RoomPerTenant[predictor_pb2.Outcome](KEPT_OUTCOMES)

    @property
    def up(self) -> bool:
        return self._up

    async def estimate(
        self, prompts: Sequence[predictor_pb2.Prompt], *, min_tokens: int = 0
    ) -> list[common_pb2.Estimate]:
        """One estimate per prompt, in order, within the budget: at least the tokens that the client wants at least.
        Those of many prompts are asked for in parts, one after the other, so that no request waits for all parts of
        another one."""
        found: list[common_pb2.Estimate] = []
        # What a call may raise: then an estimate of our own is better than no answer. Anything else is our mistake.
        with suppress(TimeoutError, CallFailed, NoEstimate):
            async with asyncio.timeout(self._budget):
                while self._up and len(found) < len(prompts):
                    part = prompts[len(found) : len(found) + PROMPTS_AT_ONCE]
                    found += await self._ask(part)
        found += [self._local.estimate(p.tenant, p.adapter, p.max_tokens) for p in prompts[len(found) :]]
        for estimate, prompt in zip(found, prompts, strict=True):
            _limit(estimate, min(min_tokens, prompt.max_tokens), prompt.max_tokens)
        return found

    def observe(self, outcome: predictor_pb2.Outcome) -> None:
        """Record the length of an answer. Never waits. If too many outcomes wait for the predictor, the oldest of a
        tenant with more than its part is dropped."""
        self._local.observe(outcome.tenant, outcome.adapter, outcome.output_tokens, censored=outcome.censored)
        if not self._outcomes.add(outcome):
            self._metrics.outcomes_lost.inc()

    async def run(self) -> None:
        """Keep a channel, probe while the predictor is down, send outcomes. Ends by cancellation."""
        async with asyncio.TaskGroup() as tasks:
            try:
                tasks.create_task(self._keep_channel())
                await self._send_outcomes()
            finally:
                self._up = False
                if self._flight is not None:
                    self._flight.cancel()

    async def _keep_channel(self) -> None:
        """Open a new channel each time the predictor was down: its address or TLS certificate may have changed."""
        while True:
            try:
                async with self._network.channel(self._address, "predictor", grace=PROBE_TIMEOUT_SECONDS) as channel:
                    await channel.call(PREDICT, predictor_pb2.PredictRequest(), seconds=PROBE_TIMEOUT_SECONDS)
                    self._channel, self._up = channel, True
                    self._went_down.clear()
                    log.info("predictor_up")
                    await self._went_down.wait()
            except (CallFailed, SetupError):
                pass  # it is tried again
            await asyncio.sleep(self._pause)  # also before one that answers a probe, and fails each request

    async def _send_outcomes(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            while self._up and self._outcomes:
                assert self._channel is not None
                batch = self._outcomes.take(OUTCOMES_AT_ONCE)
                try:
                    request = predictor_pb2.ObserveRequest(outcomes=batch)
                    answer = await self._channel.call(OBSERVE, request, seconds=OBSERVE_TIMEOUT_SECONDS)
                    lost = self._outcomes.put_back(batch[answer.accepted :])
                except CallFailed as error:
                    # The predictor knows which it has learned. What it cannot read would fail again and again.
                    again = error.code in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED)
                    lost = self._outcomes.put_back(batch) if again else len(batch)
                    if error.code is not StatusCode.DEADLINE_EXCEEDED:  # else it learns slowly, and may estimate
                        self._down(error.details)
                self._metrics.outcomes_lost.inc(lost)

    def _down(self, why: str) -> None:
        if self._up:
            self._up = False
            log.warning("predictor_down", reason=why[:200], hint="The gateway's own statistics estimate lengths.")
        self._went_down.set()

    async def _ask(self, prompts: Sequence[predictor_pb2.Prompt]) -> Sequence[common_pb2.Estimate]:
        asked = _PendingEstimate(prompts, asyncio.get_running_loop().create_future())
        self._waiting.append(asked)
        if self._flight is None:
            self._flight = asyncio.create_task(self._send_batches(), name="predict")
        try:
            return await asked.answer
        finally:
            del asked  # its error has this frame

    async def _send_batches(self) -> None:
        """Ask for all waiting estimates in batches until none waits."""
        try:
            while batch := self._next_batch():
                try:
                    await self._ask_for(batch)
                except Exception as error:  # of whatever kind: it fails every request of the call
                    self._down(error.details if isinstance(error, CallFailed) else repr(error))
                    forget_frames(error)
                    for asked in batch:
                        if not asked.answer.done():
                            asked.answer.set_exception(error)
        finally:
            self._flight = None

    def _next_batch(self) -> list[_PendingEstimate]:
        """The longest waiting, without those whose budget has ended."""
        batch: list[_PendingEstimate] = []
        prompts = 0
        while self._waiting and (not batch or prompts + len(self._waiting[0].prompts) <= PROMPTS_AT_ONCE):
            asked = self._waiting.popleft()
            if not asked.answer.done():
                batch.append(asked)
                prompts += len(asked.prompts)
        return batch

    async def _ask_for(self, batch: list[_PendingEstimate]) -> None:
        if self._channel is None or not self._up:  # the previous call failed, so the channel is closed
            raise NoEstimate("the predictor is down")
        prompts = [prompt for asked in batch for prompt in asked.prompts]
        answer = await self._channel.call(PREDICT, predictor_pb2.PredictRequest(prompts=prompts), seconds=self._budget)
        if len(answer.estimates) != len(prompts):
            raise NoEstimate(f"the predictor answered {len(answer.estimates)} of {len(prompts)} prompts")
        for estimate in answer.estimates:
            _check(estimate)
        estimates = iter(answer.estimates)
        for asked in batch:
            own = [next(estimates) for _ in asked.prompts]
            if not asked.answer.done():
                asked.answer.set_result(own)


def _check(estimate: common_pb2.Estimate) -> None:
    if not (0 < estimate.q50 <= estimate.q80 <= estimate.q90 <= estimate.q95 and 0 <= estimate.rank < inf):
        raise NoEstimate(f"the predictor answered quantiles that no lengths have: {estimate}".replace("\n", " "))


def _limit(estimate: common_pb2.Estimate, least: int, most: int) -> None:
    """To what the client allows."""
    for name in ("q50", "q80", "q90", "q95"):
        tokens = getattr(estimate, name)
        if not least <= tokens <= most:
            setattr(estimate, name, min(max(tokens, least), most))
