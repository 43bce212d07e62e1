"""Converts messages to events and effects to messages: all of the supervisor's protocol."""

from motet.api.v1 import common_pb2, supervisor_pb2
from motet.domain import InstanceName, ParkMethod, RequestId
from motet.runner_info import Capacity, RunnerIdentity, RunnerRequest, read_runner_requests
from motet_supervisor.policy import effects, events

_METHODS = {
    ParkMethod.SWAP: common_pb2.PARK_METHOD_SWAP,
    ParkMethod.RECOMPUTE: common_pb2.PARK_METHOD_RECOMPUTE,
}


def _promise(pages: int, number: int = 0) -> common_pb2.Promise:
    return common_pb2.Promise(pages=pages, number=number)


def _read_method(it: "common_pb2.ParkMethod.ValueType") -> ParkMethod:
    return ParkMethod.SWAP if it == common_pb2.PARK_METHOD_SWAP else ParkMethod.RECOMPUTE


# ------------------------------------------------------------------------------------------------------------- runners


def runner_connected(hello: supervisor_pb2.WatchHello) -> events.RunnerConnected:
    return events.RunnerConnected(
        RunnerIdentity.from_proto(hello.identity),
        Capacity.from_proto(hello.capacity),
        read_runner_requests(hello.live),
        heartbeats=hello.heartbeats,
        overcommit=hello.overcommit,
    )


def watch_event(instance: InstanceName, up: supervisor_pb2.WatchUp) -> events.Event | None:
    """The event of a runner's message after its hello; None for messages of a later version."""
    match up.WhichOneof("message"):
        case "memory":
            it = up.memory
            return events.MemoryReported(
                instance=instance,
                sequence=it.sequence,
                pages=it.pages,
                pages_free=it.pages_free,
                host_bytes_free=it.host_bytes_free,
                steps=it.steps,
                load_parts=it.load_parts,
                work_pending=it.work_pending,
                prefill_seconds_per_token=it.prefill_seconds_per_token,
                swap_seconds_per_page=it.swap_seconds_per_page,
                live=read_runner_requests(it.live),
                has_scheduler=it.has_scheduler if it.HasField("has_scheduler") else None,
            )
        case "heartbeat":
            return events.HeartbeatReceived(instance)
        case "overflow":
            return events.OverflowAnnounced(instance, RunnerRequest.from_proto(up.overflow.request))
        case "parked":
            parked = up.parked
            return events.RequestParked(
                instance,
                RequestId(parked.request),
                parked.epoch,
                parked.promise.pages,
                _read_method(parked.method),
                parked.promise.number,
            )
        case "resumed":
            back = up.resumed
            promise = back.promise
            return events.RequestResumed(instance, RequestId(back.request), back.epoch, promise.pages, promise.number)
        case "refused":
            refused = up.refused
            return events.OrderRefused(instance, RequestId(refused.request), refused.epoch, refused.promise.number)
        case "ended":
            return events.RequestEnded(instance, RequestId(up.ended.request), up.ended.epoch)
        case _:
            return None


def _overcommit(effect: effects.SetOvercommit | effects.ReportOvercommit) -> supervisor_pb2.Overcommit:
    return supervisor_pb2.Overcommit(pool=effect.pool, factor=effect.factor)


def order(effect: effects.RunnerOrder, term: int) -> supervisor_pb2.WatchDown:
    match effect:
        case effects.Extend():
            return supervisor_pb2.WatchDown(
                extend=supervisor_pb2.Extend(
                    request=effect.request,
                    epoch=effect.epoch,
                    promise=_promise(effect.pages, effect.number),
                    extended=_promise(effect.extended),
                    term=term,
                )
            )
        case effects.Park():
            return supervisor_pb2.WatchDown(
                park=supervisor_pb2.Park(
                    request=effect.request,
                    epoch=effect.epoch,
                    promise=_promise(effect.pages, effect.number),
                    doubled=_promise(effect.doubled),
                    method=_METHODS[effect.method],
                    term=term,
                )
            )
        case effects.Resume():
            return supervisor_pb2.WatchDown(
                resume=supervisor_pb2.Resume(
                    request=effect.request,
                    epoch=effect.epoch,
                    promise=_promise(effect.pages, effect.number),
                    term=term,
                )
            )
        case effects.SetOvercommit():
            return supervisor_pb2.WatchDown(overcommit=_overcommit(effect))


# ---------------------------------------------------------------------------------------------------------- scheduler


def advise_event(scheduler: int, up: supervisor_pb2.AdviseUp) -> events.Event | None:
    """The event of a scheduler's message; None for messages of a later version."""
    match up.WhichOneof("message"):
        case "hello":
            return events.SchedulerConnected(scheduler, up.hello.term)
        case "raised":
            return events.TermRaised(scheduler, up.raised.term)
        case "resumable":
            it = up.resumable
            return events.Resumable(
                it.term,
                InstanceName(it.instance),
                RequestId(it.request),
                it.epoch,
                it.promise.pages,
                it.promise.number,
            )
        case _:
            return None


def _parked(effect: effects.ReportParked) -> supervisor_pb2.RequestParked:
    return supervisor_pb2.RequestParked(
        instance=effect.instance,
        request=effect.request,
        epoch=effect.epoch,
        promise=_promise(effect.wanted, effect.number),
        method=_METHODS[effect.method],
    )


def scheduler_message(effect: effects.SchedulerMessage) -> supervisor_pb2.AdviseDown:
    match effect:
        case effects.ReportPromise():
            return supervisor_pb2.AdviseDown(
                promise=supervisor_pb2.PromiseChanged(
                    instance=effect.instance,
                    request=effect.request,
                    epoch=effect.epoch,
                    promise=_promise(effect.pages),
                )
            )
        case effects.ReportParked():
            return supervisor_pb2.AdviseDown(parked=_parked(effect))
        case effects.ReportAllParked():
            everyone = supervisor_pb2.ParkedRequests(requests=[_parked(one) for one in effect.requests])
            return supervisor_pb2.AdviseDown(parked_now=everyone)
        case effects.ReportResumed():
            return supervisor_pb2.AdviseDown(
                resumed=supervisor_pb2.RequestResumed(
                    instance=effect.instance,
                    request=effect.request,
                    epoch=effect.epoch,
                    promise=_promise(effect.pages),
                )
            )
        case effects.ReportRunnerLost():
            return supervisor_pb2.AdviseDown(
                lost=supervisor_pb2.RunnerLost(
                    runner=effect.identity.to_proto(),
                    why=effect.why,
                    hung=effect.hung,
                    silent_seconds=effect.silent_seconds,
                )
            )
        case effects.ReportOvercommit():
            return supervisor_pb2.AdviseDown(overcommit=_overcommit(effect))
