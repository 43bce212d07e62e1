"""What messages say of promises: which one is meant travels with all of them."""

from motet.api.v1 import supervisor_pb2
from motet.domain import InstanceName, ParkMethod, RequestId
from motet_supervisor import conversion
from motet_supervisor.policy import effects

R0, A, SWAP = InstanceName("r0"), RequestId("a"), ParkMethod.SWAP


def test_orders_name_the_number_of_the_promise():
    extend, park, resume = (
        conversion.order(one, 1)
        for one in (
            effects.Extend(R0, A, 1, 4, 8, 3),
            effects.Park(R0, A, 1, 4, 8, SWAP, 3),
            effects.Resume(R0, A, 1, 8, 3),
        )
    )
    assert [extend.extend.promise.number, park.park.promise.number, resume.resume.promise.number] == [3, 3, 3]


def test_what_is_parked_keeps_its_number_on_the_way_to_the_scheduler_and_back():
    told = conversion.scheduler_message(effects.ReportParked(R0, A, 1, 16, SWAP, 5))
    assert told.parked.promise.number == 5
    back = supervisor_pb2.Resumable(instance="r0", request="a", epoch=1, promise=told.parked.promise)
    event = conversion.advise_event(1, supervisor_pb2.AdviseUp(resumable=back))
    assert (event.pages, event.number) == (16, 5)


def test_a_runner_says_whether_it_has_a_scheduler_and_one_of_an_earlier_version_says_nothing():
    for said, heard in (({}, None), ({"has_scheduler": False}, False), ({"has_scheduler": True}, True)):
        memory = supervisor_pb2.MemoryReport(**said)
        assert conversion.watch_event(R0, supervisor_pb2.WatchUp(memory=memory)).has_scheduler is heard


def test_a_runner_says_of_which_promise_it_speaks():
    promise = {"pages": 8, "number": 7}
    for up in (
        supervisor_pb2.WatchUp(parked=supervisor_pb2.Parked(request="a", epoch=1, promise=promise)),
        supervisor_pb2.WatchUp(resumed=supervisor_pb2.Resumed(request="a", epoch=1, promise=promise)),
        supervisor_pb2.WatchUp(refused=supervisor_pb2.OrderRefused(request="a", epoch=1, promise=promise)),
    ):
        assert conversion.watch_event(R0, up).number == 7
