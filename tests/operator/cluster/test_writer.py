"""The writer, its events and what holds them back, against an API server that answers as it is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from motet.clock import FakeClock
from motet.kube import ApiError, KubeCredentials, Unreachable
from motet_operator.cluster import write_executor
from motet_operator.cluster.api import Api, ApiRefused, RequestLimiter
from motet_operator.cluster.cache import Cache
from motet_operator.cluster.events import EventWriter
from motet_operator.cluster.kinds import ADAPTERS, BUDGETS, DEPLOYMENTS, Kind, Object
from motet_operator.cluster.obstacles import Obstacle, ObstacleLog
from motet_operator.cluster.vanished import VanishedObjects
from motet_operator.cluster.write_executor import WriteExecutor
from motet_operator.cluster.writes import OwnedObjectWrite, StatusWrite, Write
from motet_operator.metrics import ClusterMetrics
from tests.common.virtual_time import in_virtual_time
from tests.common.waiting import until
from tests.operator.cluster.objects import adapter, pool, snapshot
from tests.support.fake_watch_api import FakeWatchApi
from tests.support.metric_values import value_of

LONG_S = 100.0
"""Of virtual time: what has not happened until then does not happen."""


class ScriptedApi:
    """Carries everything out, but for the answers that it was given to say first."""

    def __init__(self, *answers: ApiError | Object) -> None:
        self.answers = list(answers)
        self.applied: list[Object] = []
        self.served: frozenset[str] = frozenset({"create"})

    async def apply(self, kind: Kind, document: Object, **_: Any) -> Object:
        await asyncio.sleep(0)
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, ApiError):
                raise answer
            self.applied.append(document)
            return answer
        self.applied.append(document)
        metadata = document["metadata"] | {"resourceVersion": str(100 + len(self.applied))}
        return document | {"metadata": metadata}

    async def verbs(self, kind: Kind) -> frozenset[str]:
        return self.served


NO_RIGHT = 'pools "x" is forbidden: User "operator" cannot patch resource "pools"'


def refused(status: int, message: str = "no") -> ApiRefused:
    return ApiRefused("patch", ADAPTERS, "tenant", status=status, message=message, subresource=True)


def wanted(status: str = "new", name: str = "legal") -> StatusWrite:
    return StatusWrite(ADAPTERS, ("tenant", name), f"tenant/{name}", {"said": status})


class Setup:
    def __init__(self, api: ScriptedApi | Api, *, leading: bool = True, time_scale: float = 0.01) -> None:
        self.cache = Cache()
        self.cache.put(ADAPTERS, adapter())
        self.obstacle_log = ObstacleLog()
        self.denied: list[Obstacle] = []
        self.written: list[Write] = []
        self.leading = leading
        self.writer = WriteExecutor(
            api,  # type: ignore[arg-type]
            self.cache,
            self.obstacle_log,
            ClusterMetrics(CollectorRegistry()),
            leading=lambda: self.leading,
            written=self.written.append,
            denied=lambda _, obstacle: self.denied.append(obstacle),
            time_scale=time_scale,
        )

    def want(self, *writes: Write) -> None:
        self.writer.set_writes({write.key: write for write in writes})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.writer.run(4))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


class SlowLimiter(RequestLimiter):
    """The first request passes at once; the others wait until the test sets `go_on`."""

    def __init__(self) -> None:
        super().__init__(rate=1, burst=1)
        self.asked = 0
        self.go_on = asyncio.Event()

    async def take(self) -> None:
        self.asked += 1
        if self.asked > 1:
            await self.go_on.wait()


async def test_an_operator_that_lost_leadership_while_waiting_writes_nothing(tmp_path: Path) -> None:
    """A request may wait for a minute, if the API server asked for a pause."""
    limiter = SlowLimiter()
    server, metrics = FakeWatchApi(), ClusterMetrics(CollectorRegistry())
    async with server.running():
        leads = True
        api = Api(
            KubeCredentials(server.kubeconfig(tmp_path / "kubeconfig"), "SETTING"),
            limiter,
            metrics,
            may_write=lambda: leads,
        )
        setup = Setup(api)
        setup.cache.put(ADAPTERS, adapter("other"))
        async with setup.running():
            setup.want(wanted(), wanted(name="other"))
            await until(lambda: server.written and limiter.asked == 2)
            leads = setup.leading = False
            limiter.go_on.set()
            await asyncio.sleep(0.1)
            assert len(server.written) == 1
            leads = setup.leading = True
            await until(lambda: len(server.written) == 2)
            await until(lambda: setup.writer.depth == 0)
        await api.close()


@in_virtual_time
async def test_a_write_happens_once_and_is_in_the_cache() -> None:
    api = ScriptedApi()
    setup = Setup(api)
    async with setup.running():
        setup.want(wanted())
        await until(lambda: setup.written)
        setup.want(wanted())  # from a round that had not yet seen the answer
        await asyncio.sleep(LONG_S)
    assert len(api.applied) == 1
    known = setup.cache.get(ADAPTERS, ("tenant", "legal"))
    assert known is not None
    assert known["status"] == {"said": "new"}


@pytest.mark.parametrize("error", [refused(409), refused(422), refused(500), refused(429), Unreachable("gone")])
async def test_a_failed_key_is_retried(error: ApiError) -> None:
    setup = Setup(ScriptedApi(error, error))
    async with setup.running():
        setup.want(wanted())
        await until(lambda: setup.written)
    assert setup.denied == []


async def test_the_newest_write_replaces_a_waiting_one() -> None:
    api = ScriptedApi(refused(409))
    setup = Setup(api, time_scale=1.0)
    async with setup.running():
        setup.want(wanted("old"))
        await until(lambda: not api.answers)
        setup.want(wanted("new"))
        await until(lambda: setup.written)
    assert [one["status"] for one in api.applied] == [{"said": "new"}]


@in_virtual_time
async def test_an_outdated_write_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_executor, "monotonic", asyncio.get_running_loop().time)
    api = ScriptedApi(refused(409))
    setup = Setup(api, time_scale=1.0)
    async with setup.running():
        setup.want(wanted())
        await until(lambda: not api.answers)
        setup.want()
        await asyncio.sleep(LONG_S)
    assert api.applied == []
    assert setup.writer.depth == 0


async def test_a_missing_permission_is_reported_once_until_it_is_granted() -> None:
    setup = Setup(ScriptedApi(refused(403, NO_RIGHT), refused(403, NO_RIGHT)))
    async with setup.running():
        setup.want(wanted())
        await until(lambda: setup.denied)
        assert len(setup.obstacle_log) == 1
        await until(lambda: setup.written)
    assert [obstacle.reason for obstacle in setup.denied] == ["PermissionDenied"]
    assert len(setup.obstacle_log) == 0


async def test_a_taken_name_is_reported_at_once_and_retried_until_it_is_free() -> None:
    budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": {}}
    budget["metadata"] = {"name": "demo", "namespace": "pools"}
    theirs = budget | {"metadata": {**budget["metadata"], "managedFields": [{"manager": "kubectl"}]}}

    class WithForeignObject(ScriptedApi):
        async def list(self, *_: Any, **__: Any) -> tuple[list[Object], int]:
            return [] if free else [theirs], 1

    free = False
    setup = Setup(WithForeignObject())
    async with setup.running():
        setup.want(OwnedObjectWrite(BUDGETS, budget))
        await until(lambda: len(setup.obstacle_log))
        assert [obstacle.reason for obstacle in setup.denied] == ["NameTaken"]
        assert setup.denied[0].message.startswith("PodDisruptionBudget demo of this namespace")
        free = True
        await until(lambda: setup.written)
    assert len(setup.obstacle_log) == 0


async def test_an_obstacle_ends_when_its_write_succeeds() -> None:
    """Nobody asks again for what is no longer wanted, so nobody would find out that the right is back."""
    setup = Setup(ScriptedApi(*[refused(403, NO_RIGHT)] * 3))
    async with setup.running():
        setup.want(wanted())
        await until(lambda: len(setup.obstacle_log))
        setup.want()
        assert len(setup.obstacle_log) == 0

    setup = Setup(ScriptedApi(*[refused(403, NO_RIGHT)] * 3), time_scale=0.3)
    async with setup.running():
        setup.want(wanted())
        await until(lambda: len(setup.obstacle_log))
        setup.cache.put(ADAPTERS, adapter(version=9) | {"status": {"said": "new"}})  # somebody else has done it
        await until(lambda: not len(setup.obstacle_log))
    assert setup.written == []


async def test_an_obstacle_of_a_write_s_extra_request_ends_when_the_write_succeeds() -> None:
    """To delete a pod is also to get it."""
    get = ApiRefused("get", ADAPTERS, "tenant", status=403, message=NO_RIGHT)
    setup = Setup(ScriptedApi(get))
    async with setup.running():
        setup.want(wanted())
        await until(lambda: setup.written)
    assert "may not get" in setup.denied[0].message
    assert len(setup.obstacle_log) == 0


@pytest.mark.parametrize("status", [400, 403, 409, 422, 500])
async def test_a_repeatedly_refused_write_is_an_obstacle_with_the_servers_message(status: int) -> None:
    why = 'admission webhook "teams" denied the request: no team'
    setup = Setup(ScriptedApi(*[refused(status, why)] * 5))
    async with setup.running():
        setup.want(wanted())
        await until(lambda: setup.denied)
        (key,) = setup.obstacle_log.standing().writes
        assert key == wanted().key
        await until(lambda: setup.written)
    assert [obstacle.reason for obstacle in setup.denied] == ["RunnersRefused"]
    assert setup.denied[0].message.endswith(why)
    assert len(setup.obstacle_log) == 0


@pytest.mark.parametrize("errors", [[refused(409)] * 3, [refused(429)] * 5, [Unreachable("away")] * 5])
async def test_a_temporary_error_is_not_reported(errors: list[ApiError]) -> None:
    setup = Setup(ScriptedApi(*errors))
    async with setup.running():
        setup.want(wanted())
        await until(lambda: setup.written)
    assert setup.denied == []


GOING = refused(403, 'cannot create in namespace "x" because it is being terminated')


@pytest.mark.parametrize("answer", [refused(404), GOING], ids=["gone", "going"])
async def test_a_deleted_object_and_a_terminating_namespace_are_no_obstacles(answer: ApiError) -> None:
    api = ScriptedApi(*[answer] * 5)
    setup = Setup(api)
    async with setup.running():
        setup.want(wanted())
        await until(lambda: setup.written)  # it was somebody else's mistake, and is back
    assert setup.denied == []


@pytest.mark.parametrize("answer", [refused(404), GOING], ids=["gone", "going"])
@in_virtual_time
async def test_a_write_to_a_missing_object_is_not_repeated_in_every_round(answer: ApiError) -> None:
    """An object outlives its namespace when that goes while the API server starts and does not know the kind yet."""
    api = ScriptedApi(*[answer] * 30)
    setup = Setup(api, time_scale=1000.0)
    async with setup.running():
        for _ in range(30):
            setup.want(wanted())
            await asyncio.sleep(0.01)
    assert len(api.answers) == 29


@in_virtual_time
async def test_an_unsure_leader_writes_nothing() -> None:
    api = ScriptedApi()
    setup = Setup(api, leading=False, time_scale=100_000.0)
    async with setup.running():
        setup.want(wanted())
        await asyncio.sleep(LONG_S)
        assert api.applied == []
        setup.leading = True
        await until(lambda: setup.written)  # it was no failure, after which it would wait for hours


@in_virtual_time
async def test_fields_that_the_server_drops_are_not_written_again() -> None:
    """A field that an older definition prunes would otherwise be written for ever."""
    pruned = adapter(version=50) | {"status": {}}
    api = ScriptedApi(pruned)
    setup = Setup(api)
    async with setup.running():
        for _ in range(3):
            setup.want(wanted())
            await asyncio.sleep(LONG_S)
    assert len(api.applied) == 1


def test_a_missing_right_is_reported_with_verb_resource_and_namespace() -> None:
    obstacle_log = ObstacleLog()
    obstacle_log.note(ApiRefused("list", DEPLOYMENTS, "pools", status=403, message="no"))
    why = "the operator may not list deployments.apps in namespace pools; grant that verb to its ServiceAccount"
    assert obstacle_log.standing().forbidden_namespaces == {"pools": Obstacle("PermissionDenied", why)}
    obstacle_log.clear(DEPLOYMENTS, "pools")
    assert obstacle_log.standing().forbidden_namespaces == {}


# -------------------------------------------------------------------------------------------------------------- events


async def test_a_repeated_event_is_counted_and_posted_again_later() -> None:
    api, clock = ScriptedApi(), FakeClock()
    events = EventWriter(api, ClusterMetrics(CollectorRegistry()), "me", clock=clock)  # type: ignore[arg-type]
    task = asyncio.create_task(events.run())
    for _ in range(5):
        events.post(ADAPTERS, adapter(), "Warning", "FetchFailed", "cannot be fetched")
    events.post(ADAPTERS, adapter(), "Normal", "Serving", "")
    await until(lambda: len(api.applied) == 2)
    clock.advance(301)
    events.post(ADAPTERS, adapter(), "Warning", "FetchFailed", "cannot be fetched")
    await until(lambda: len(api.applied) == 3)
    task.cancel()
    first, _, last = api.applied
    assert (first["count"], last["count"]) == (1, 6)
    assert first["metadata"]["name"] == last["metadata"]["name"]  # one Event, not two


async def test_an_event_that_is_refused_is_dropped_and_the_next_one_is_posted() -> None:
    api = ScriptedApi(refused(403), Unreachable("away"))
    events = EventWriter(api, ClusterMetrics(CollectorRegistry()), "me")  # type: ignore[arg-type]
    task = asyncio.create_task(events.run())
    for number in range(3):
        events.post(ADAPTERS, adapter(f"a-{number}"), "Warning", "FetchFailed", "")
    await until(lambda: api.applied or task.done())
    assert [one["involvedObject"]["name"] for one in api.applied] == ["a-2"]
    task.cancel()


async def test_too_many_events_are_dropped_and_delay_nothing() -> None:
    metrics = ClusterMetrics(CollectorRegistry())
    events = EventWriter(ScriptedApi(), metrics, "me")  # type: ignore[arg-type]
    for number in range(1000):
        events.post(ADAPTERS, adapter(f"a-{number}"), "Warning", "FetchFailed", "")
    assert value_of(metrics.events.labels("dropped")) == 1000 - 256


# ---------------------------------------------------------------------------------------------------------- continuity


async def names(continuity: VanishedObjects, *objects: Object) -> list[str]:
    return sorted(name for _, name in (await continuity.complete(snapshot(*objects)))[ADAPTERS])


async def test_objects_that_vanish_with_their_kind_are_kept_for_a_while() -> None:
    api, clock = ScriptedApi(), FakeClock()
    continuity = VanishedObjects(api, 600, clock)  # type: ignore[arg-type]
    assert await names(continuity, pool(), adapter(), adapter("other")) == ["legal", "other"]
    api.served = frozenset({"get", "list", "watch", "delete"})  # a definition that is being deleted
    assert await names(continuity, pool(), adapter()) == ["legal", "other"]
    assert await names(continuity, pool()) == ["legal", "other"]
    api.served = frozenset({"create"})  # made again, and its objects are not there yet
    assert await names(continuity, pool(), adapter("new")) == ["legal", "new", "other"]
    assert await names(continuity, pool(), adapter("new"), adapter("other", version=9)) == ["legal", "new", "other"]
    assert continuity.due() == 600
    clock.advance(601)
    assert await names(continuity, pool(), adapter("new"), adapter("other", version=9)) == ["new", "other"]
    assert continuity.due() is None


async def test_objects_that_are_deleted_one_by_one_are_gone_at_once() -> None:
    continuity = VanishedObjects(ScriptedApi(), 600)  # type: ignore[arg-type]
    assert await names(continuity, pool(), adapter()) == ["legal"]
    assert await names(continuity, pool()) == []
