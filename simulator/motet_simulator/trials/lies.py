"""A host that lies: what its process says about requests is changed on its way, or said although it is not so.

A runner denies requests that it has, names some twice, claims pages, and invents requests: its own, those of others,
and some that nobody has. It declines, ends and answers what another runner has. A gateway ends, cancels and loses
requests of another gateway. About its own requests a gateway tells the truth, and a runner its gateways: they believe
it, as nobody else can know.
"""

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2, supervisor_pb2

if TYPE_CHECKING:
    from motet_simulator.trials.system import System

MAX_NAMED = 3
"""Requests of others in one message."""

CLAIMED_PAGES = 1, 3, 50, 2**31
CLAIMED_TOKENS = 0, 5, 10**9
LATER = 1000
"""How far the epochs of lies are ahead of the true ones: no request gets there. With the next one a lie would come true
if the request were placed here while it is on its way."""
NOBODY = "nobody"


class Named(NamedTuple):
    """A request that a host names although it does not have it."""

    request: str
    epoch: int
    gateway: str


class Liar:
    def __init__(self, system: "System", host: str, seed: str) -> None:
        self._system = system
        self._host = host
        self._random = Random(seed)

    def says(self, message: Any) -> Iterator[Any]:
        """What it says instead of this message."""
        match message:
            case scheduler_pb2.AttachUp() | supervisor_pb2.WatchUp():
                yield self._altered(message)
                yield from self._runners_lie(type(message))
            case bytes():  # to a gateway: a step, already encoded
                yield message
                if self._random.random() < 0.2:
                    yield from (self._answer(one).SerializeToString() for one in self._others())
            case scheduler_pb2.ServeUp() if self._host.startswith("gateway"):
                yield message
                yield from map(self._gateways_lie, self._others())
            case _:
                yield message

    def _altered(self, message: Any) -> Any:
        kind = message.WhichOneof("message")
        if kind not in ("hello", "report", "memory"):
            return message
        altered = type(message)()
        altered.CopyFrom(message)
        said, true = getattr(altered, kind), list(getattr(message, kind).live)
        del said.live[:]
        for entry in true:
            said.live.extend(self._entries(entry))
        for one in self._others():
            entry = common_pb2.RunnerRequest(request=one.request, epoch=one.epoch, gateway=one.gateway, prompt_tokens=9)
            said.live.append(self._claimed(entry))
        if kind == "report":
            said.pages_free = self._random.choice(CLAIMED_PAGES)
            said.pages = self._random.choice((said.pages, *CLAIMED_PAGES))
        return altered

    def _entries(self, true: common_pb2.RunnerRequest) -> Iterator[common_pb2.RunnerRequest]:
        """None, one or two for a request that it has."""
        yield from [true, self._claimed(true)][: self._random.choice((0, 1, 2))][:: self._random.choice((1, -1))]

    def _claimed(self, entry: common_pb2.RunnerRequest) -> common_pb2.RunnerRequest:
        claimed, draw = common_pb2.RunnerRequest(), self._random.choice
        claimed.CopyFrom(entry)
        claimed.promise.pages = draw(CLAIMED_PAGES)
        claimed.pages_used, claimed.charged_pages = draw(CLAIMED_PAGES), draw((0, *CLAIMED_PAGES))
        claimed.output_tokens, claimed.parked_times = draw(CLAIMED_TOKENS), draw((0, 1, 10**6))
        claimed.state = draw((common_pb2.SEQUENCE_STATE_DECODE, common_pb2.SEQUENCE_STATE_PARKED))
        return claimed

    def _runners_lie(self, kind: type) -> Iterator[Any]:
        for one in self._others():
            about: dict[str, Any] = {"request": one.request, "epoch": one.epoch}
            promise = {"pages": self._random.choice(CLAIMED_PAGES), "number": 1}
            if kind is scheduler_pb2.AttachUp:
                lies: list[dict[str, Any]] = [
                    {"declined": about | {"failure": {"code": "adapter_incompatible", "message": "a lie"}}},
                    {"ended": {"sequences": [about, about]}},
                ]
            else:
                lies = [{name: about | {"promise": promise}} for name in ("parked", "resumed", "refused")]
                lies.append({"ended": about})
            yield kind(**self._random.choice(lies))

    def _answer(self, one: Named) -> runner_pb2.GenerateDown:
        about: dict[str, Any] = {"request": one.request, "epoch": one.epoch}
        finish = self._random.choice((0, common_pb2.FINISH_REASON_LENGTH))
        step = about | {"index": self._random.choice((0, 1, 10)), "tokens": [1], "finish": finish}
        failure = {"code": "adapter_incompatible", "message": "a lie"}
        lies: list[dict[str, Any]] = [{"step": {"sequences": [step]}}, {"declined": about | {"failure": failure}}]
        return runner_pb2.GenerateDown(**self._random.choice(lies))

    def _gateways_lie(self, one: Named) -> scheduler_pb2.ServeUp:
        about: dict[str, Any] = {"request": one.request, "epoch": one.epoch}
        lies: list[dict[str, Any]] = [
            {"cancel": about | {"reason": "a lie"}},
            {"finished": about | {"reason": common_pb2.FINISH_REASON_LENGTH}},
            {"lost": about | {"why": "a lie", "delivered_tokens": self._random.choice(CLAIMED_TOKENS)}},
        ]
        return scheduler_pb2.ServeUp(**self._random.choice(lies))

    def _others(self) -> list[Named]:
        """Some requests that this host does not have."""
        system = self._system
        own: set[str] = set()
        if (runner := system.runners.get(self._host)) is not None:
            own = {one.request for one in runner.runner.accepted}
        elif (gateway := system.gateways.get(self._host)) is not None:
            own = set(gateway.dispatcher.choices)
        known = system.leader.scheduler.requests.values() if system.leader is not None else ()
        others = []
        for one in known:
            placed = one.placement
            here = any(at is not None and at.instance == self._host for at in (placed, one.left))
            if one.id not in own and not here and self._host not in one.avoid:  # else it is or was last here
                others.append(Named(one.id, placed.epoch if placed is not None else one.epoch, one.gateway))
        if self._host.startswith("runner"):
            gateways = [*system.gateways, NOBODY]
            others += [Named(f"invented-{number}", 1, self._random.choice(gateways)) for number in range(2)]
        some = self._random.sample(others, self._random.randint(0, min(MAX_NAMED, len(others))))
        return [one._replace(epoch=self._epoch(one.epoch)) for one in some]

    def _epoch(self, true: int) -> int:
        """The true one or another. 0 is that of a request that was never placed."""
        claimed = true + self._random.choice((0, 0, LATER, -1))
        return claimed if claimed > 0 else LATER
