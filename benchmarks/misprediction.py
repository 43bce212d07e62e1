"""What wrong promises cost, in virtual time: the share of penalty and overhead in the time of generation (S3-20).

The preset `s3` runs Alpaca-like requests in memory for 8 sequences of the model's maximum, with the step times of
`benchmarks.memory_pressure`. Penalty is the time from a park to the next token. Overhead, of which virtual time has
none, is 10 ms for each request: what the gateway may take for an estimate, and a placement. Generation is the rest from
the beginning of a request to its end. Wrong promises are spread evenly: either one in 71 is half of what its request
will need, as many as the paper's predictor had wrong, or two in five are halved.
"""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness import Result
from benchmarks.memory_pressure import PROMPT_TOKEN_MS, SEQUENCE_MS, STEP_MS, USUAL_TOKENS
from benchmarks.virtual_plan import Request, Runner, Workload
from motet.domain import PAGE_TOKENS, RequestId, pages_for
from motet_runner.plan.presets import UNBOUNDED

OVERHEAD_MS = 10.0

Cut = Callable[[int, Request], int]
"""The pages of a wrong promise, of the right one and a request"""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    share: float
    """Of the promises that are wrong"""
    cut: Cut
    most: float
    """The target"""


CASES = (
    Case("penalty_share", 0.014, lambda _, request: pages_for(request.prompt + request.output, PAGE_TOKENS) // 2, 0.03),
    Case("penalty_share_40", 0.4, lambda promise, _: promise // 2, 0.06),
)


class MistakenRunner(Runner):
    def __init__(self, workload: Workload, case: Case) -> None:
        super().__init__(workload, "s3", pages=USUAL_TOKENS // PAGE_TOKENS, places=USUAL_TOKENS // PAGE_TOKENS)
        self._case = case
        self._wrong = 0.0

    def _arrive(self) -> None:
        known = len(self.waiting)
        super()._arrive()
        for one in self.waiting[known:]:
            self._wrong += self._case.share
            if self._wrong >= 1:
                self._wrong -= 1
                one.promise = max(1, self._case.cut(one.promise, one.request))


def share_of(workload: Workload, case: Case) -> float:
    """Penalty and overhead, divided by generation, summed over all requests."""
    runner = MistakenRunner(workload, case)
    sequences = runner.planner.sequences
    began: dict[RequestId, float] = {}
    parked: dict[RequestId, tuple[float, int]] = {}
    """Request → when it was parked, and its tokens then"""

    def tokens_of(request: RequestId) -> int:
        sequence = sequences.get(request)
        return UNBOUNDED if sequence is None else sequence.output_tokens

    ever_parked = set[RequestId]()
    now, lived, penalty = 0.0, 0.0, 0.0
    while runner.busy:
        step = runner.step()
        for sequence in sequences:
            began.setdefault(sequence.request, now)
        parked.update((request, (now, tokens_of(request))) for request in step.parked)
        ever_parked.update(step.parked)
        begin = now
        now += STEP_MS + SEQUENCE_MS * step.decodes + PROMPT_TOKEN_MS * sum(step.prefills)
        for request, (since, tokens) in list(parked.items()):
            if tokens_of(request) > tokens:
                penalty += now - since
                del parked[request]
        for request in step.ended:
            lived += now - began.pop(request, begin)
    overhead = OVERHEAD_MS * len(workload.requests)
    share = (penalty + overhead) / (lived - penalty)
    print(
        f"  {case.share:.1%} of promises wrong: {len(ever_parked) / len(workload.requests):.1%} of requests parked, "
        f"penalty {penalty / (lived - penalty):.2%}, overhead {overhead / (lived - penalty):.2%} of generation"
    )
    return share


def measure(workload: Workload) -> list[Result]:
    print(f"wrong promises of s3, {len(workload.requests)} requests like {workload.name}'s")
    shares = {case: share_of(workload, case) for case in CASES}
    return [Result(case.name, share, "", f"<= {case.most:g}", share <= case.most) for case, share in shares.items()]
