"""How a simulated gateway estimates the length of an answer."""

from collections import OrderedDict
from collections.abc import Iterable

from motet.length_statistics import LengthStatistics
from motet.promises import LENGTH_OF_MAX_TOKENS, PROMISE_QUANTILES
from motet_gateway.estimator import KEPT_STATISTICS, MIN_ANSWERS
from motet_scheduler.policy.values import Estimate
from motet_simulator.plan.setup import Lengths
from motet_simulator.workloads.request import WorkloadRequest

_SHARES = [percent / 100 for percent in PROMISE_QUANTILES]


class Estimates:
    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._statistics: OrderedDict[tuple[str, str], LengthStatistics] = OrderedDict()

    def of(self, asked: WorkloadRequest, most: int) -> Estimate:
        """`most`: the tokens that its client asks for."""
        if self._lengths == "exact":
            length = min(asked.output_tokens, most)
            return _estimate((length,) * 4, "exact")
        statistics = self._statistics.get((asked.tenant, asked.adapter))
        if statistics is None or statistics.count < MIN_ANSWERS:
            return _estimate((most,) * 4, LENGTH_OF_MAX_TOKENS)
        quantiles = statistics.quantiles(_SHARES) or (most,) * 4
        return _estimate([min(one or most, most) for one in quantiles], "tenant")

    def observe(self, asked: WorkloadRequest, tokens: int, most: int) -> None:
        if self._lengths != "answers":
            return
        key = (asked.tenant, asked.adapter)
        statistics = self._statistics.setdefault(key, LengthStatistics())
        self._statistics.move_to_end(key)
        statistics.observe(tokens, censored=tokens >= most)
        if len(self._statistics) > KEPT_STATISTICS:
            self._statistics.popitem(last=False)


def _estimate(quantiles: Iterable[int], source: str) -> Estimate:
    q50, q80, q90, q95 = quantiles
    return Estimate(q50=q50, q80=q80, q90=q90, q95=q95, mean=q50, source=source)
