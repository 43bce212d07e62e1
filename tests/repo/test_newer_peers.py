"""A peer of a newer version says what this one does not know: it is understood as far as it goes, nothing breaks."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2, supervisor_pb2
from motet.domain import BASE, InstanceName
from motet.rpc.packing import unpacked
from motet.runner_info import (
    RequestClass,
    RunnerIdentity,
    SequenceState,
    Tier,
    read_resident_adapters,
    read_runner_requests,
)
from motet_gateway.routes import models
from motet_operator import sync
from motet_runner import generate_service
from motet_scheduler import conversion as scheduler
from motet_scheduler.policy import events
from motet_scheduler.policy.values import AdapterStage
from motet_supervisor import conversion as supervisor
from tests.support.hostile_messages import UNKNOWN_VALUE, hostile

RUNNER = RunnerIdentity(instance="r0")


def submit(up: runner_pb2.GenerateUp) -> Any:
    up.submit.request = "a"
    del up.submit.choices[1:]
    if not up.submit.choices:
        up.submit.choices.add()
    return generate_service.sequence_of(up.submit, tuple(up.submit.prompt_ids), base_digest=BASE)


def operator_hears(down: scheduler_pb2.SyncDown) -> Any:
    return sync.knowledge_of(down.adapter)


READERS: list[tuple[Any, Callable[[Any], Any]]] = [
    (scheduler_pb2.ServeUp, lambda up: scheduler.serve_event("g", up)),
    (scheduler_pb2.GatewayHello, scheduler.gateway_connected),
    (scheduler_pb2.AttachUp, lambda up: scheduler.attach_event(RUNNER, up)),
    (scheduler_pb2.RunnerHello, scheduler.runner_attached),
    (scheduler_pb2.SyncUp, scheduler.sync_event),
    (supervisor_pb2.AdviseDown, scheduler.supervisor_event),
    (supervisor_pb2.WatchUp, lambda up: supervisor.watch_event(InstanceName("r0"), up)),
    (supervisor_pb2.WatchHello, supervisor.runner_connected),
    (supervisor_pb2.AdviseUp, lambda up: supervisor.advise_event(1, up)),
    (runner_pb2.GenerateUp, submit),
    (scheduler_pb2.SyncDown, operator_hears),
]


@pytest.mark.parametrize(("kind", "read"), READERS, ids=[kind.__name__ for kind, _ in READERS])
def test_no_value_of_a_newer_version_breaks_a_stream(kind: Any, read: Callable[[Any], Any]) -> None:
    for message in hostile(kind, types=(FieldDescriptor.TYPE_ENUM,)):
        read(message)


def test_each_value_of_a_newer_version_has_a_meaning() -> None:
    assert RequestClass.from_proto(UNKNOWN_VALUE) is RequestClass.STANDARD
    adapters = read_resident_adapters([common_pb2.ResidentAdapter(digest="d", tier=UNKNOWN_VALUE)])  # type: ignore[arg-type]
    assert adapters["d"] is Tier.NONE
    assert AdapterStage.from_proto(UNKNOWN_VALUE) is AdapterStage.NONE
    assert models.STATES.get(UNKNOWN_VALUE, "unknown") == "unknown"  # type: ignore[call-overload]
    (entry,) = read_runner_requests([common_pb2.RunnerRequest(state=UNKNOWN_VALUE)])  # type: ignore[arg-type]
    assert entry.state is SequenceState.WAITING
    adapter = scheduler_pb2.AdapterEntry(max_class=UNKNOWN_VALUE)  # type: ignore[arg-type]
    stated = scheduler.sync_event(scheduler_pb2.SyncUp(snapshot=scheduler_pb2.CatalogSnapshot(adapters=[adapter])))
    assert isinstance(stated, events.CatalogReplaced)
    assert stated.adapters[0].max_class is RequestClass.STANDARD


STREAMS = [
    runner_pb2.GenerateUp,
    runner_pb2.GenerateDown,
    scheduler_pb2.ServeUp,
    scheduler_pb2.ServeDown,
    scheduler_pb2.AttachUp,
    scheduler_pb2.AttachDown,
    scheduler_pb2.SyncUp,
    scheduler_pb2.SyncDown,
    supervisor_pb2.WatchUp,
    supervisor_pb2.WatchDown,
    supervisor_pb2.AdviseUp,
    supervisor_pb2.AdviseDown,
]


@pytest.mark.parametrize("kind", STREAMS, ids=lambda kind: kind.__name__)
def test_a_message_of_a_newer_version_is_ignored(kind: Any) -> None:
    assert 14 not in kind.DESCRIPTOR.fields_by_number
    newer = kind.FromString(bytes([14 << 3 | 2, 0]))
    assert list(unpacked(newer)) == []
    known = next(field.name for field in kind.DESCRIPTOR.oneofs_by_name["message"].fields)
    ours = kind()
    getattr(ours, known).SetInParent()
    assert list(unpacked(ours)) == [ours]
    if "more" in kind.DESCRIPTOR.fields_by_name:
        assert list(unpacked(kind(more=[newer, ours, newer, ours]))) == [ours, ours]
