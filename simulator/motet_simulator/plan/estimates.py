"""How a simulated gateway estimates the length of an answer."""

from collections import OrderedDict

from motet.length_statistics import LengthStatistics
from motet_gateway.estimator import KEPT_STATISTICS, MIN_ANSWERS
from motet_scheduler.policy.values import Estimate
from motet_simulator.plan.setup import Lengths
from motet_simulator.workloads.request import WorkloadRequest


class Estimates:
    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._statistics: OrderedDict[tuple[str, str], LengthStatistics] = OrderedDict()

    def of(self, asked: WorkloadRequest, most: int) -> Estimate:
        """`most`: the tokens that its client asks for."""
        if self._lengths == "exact":
            length = min(asked.output_tokens, most)
            return Estimate(q50=length, q80=length, q90=length, q95=length, rank=length, source="exact")
        statistics = self._statistics.get((asked.tenant, asked.adapter))
        if statistics is None or statistics.count < MIN_ANSWERS:
            return Estimate(q50=most, q80=most, q90=most, q95=most, rank=most, source="max_tokens")
        q80 = min(statistics.quantile(0.8) or most, most)
        return Estimate(q50=q80, q80=q80, q90=q80, q95=q80, rank=q80, source="tenant")  # placement reads q80 alone

    def observe(self, asked: WorkloadRequest, tokens: int, most: int) -> None:
        if self._lengths != "answers":
            return
        key = (asked.tenant, asked.adapter)
        statistics = self._statistics.setdefault(key, LengthStatistics())
        self._statistics.move_to_end(key)
        statistics.observe(tokens, censored=tokens >= most)
        if len(self._statistics) > KEPT_STATISTICS:
            self._statistics.popitem(last=False)
