"""Messages that wait to be written are sent together in one pack, and arrive unchanged and in order."""

import asyncio

from motet.api.v1 import runner_pb2, scheduler_pb2, scheduler_pb2_grpc
from motet.rpc import Link, Outbox, run_stream
from motet.rpc.packing import MAX_PACK_BYTES, packed, unpacked
from motet.transport.methods import SERVE
from motet.transport.over_grpc import GrpcNetwork, GrpcServerStream, serving
from tests.common.waiting import PATIENCE_S


def submit(number: int, tokens: int = 1) -> runner_pb2.GenerateUp:
    return runner_pb2.GenerateUp(submit=runner_pb2.Submit(request=str(number), prompt_ids=[7] * tokens))


def outbox_with(*messages: runner_pb2.GenerateUp) -> Outbox[runner_pb2.GenerateUp]:
    outbox: Outbox[runner_pb2.GenerateUp] = Outbox()
    for message in messages:
        outbox.put(message)
    return outbox


def test_a_single_message_is_sent_without_a_pack() -> None:
    alone = submit(0)
    assert packed(alone, outbox_with()) is alone
    assert list(unpacked(alone)) == [alone]


def test_waiting_messages_are_sent_in_order_and_unchanged() -> None:
    messages = [submit(number) for number in range(5)]
    pack = packed(messages[0], outbox_with(*messages[1:]))
    assert list(unpacked(pack)) == messages
    assert not messages[0].more


def test_a_pack_stays_small_enough_to_be_received() -> None:
    messages = [submit(number, tokens=2 * MAX_PACK_BYTES // 3) for number in range(4)]
    outbox = outbox_with(*messages[1:])
    assert len(list(unpacked(packed(messages[0], outbox)))) == 2
    assert outbox.get_nowait() is not None


async def test_order_survives_a_stream_in_both_directions(tmp_path) -> None:
    class Echo(scheduler_pb2_grpc.SchedulerServicer):
        async def Serve(self, request_iterator, context) -> None:
            outbox: Outbox[scheduler_pb2.ServeDown] = Outbox()

            def receive(message: scheduler_pb2.ServeUp) -> None:
                outbox.put(scheduler_pb2.ServeDown(placed=scheduler_pb2.Placed(request=message.enqueue.request)))

            await run_stream(GrpcServerStream(request_iterator, context), outbox, receive)

    heard: list[str] = []
    done = asyncio.Event()

    def hear(message: scheduler_pb2.ServeDown) -> None:
        heard.append(message.placed.request)
        if len(heard) == 500:
            done.set()

    address = f"unix:{tmp_path}/s.sock"
    async with serving(address, lambda server: scheduler_pb2_grpc.add_SchedulerServicer_to_server(Echo(), server)):
        link: Link[scheduler_pb2.ServeUp, scheduler_pb2.ServeDown] = Link(
            "echo",
            address,
            SERVE,
            network=GrpcNetwork(),
            greet=lambda: [
                scheduler_pb2.ServeUp(enqueue=scheduler_pb2.Enqueue(request=str(number))) for number in range(500)
            ],
            receive=hear,
        )
        running = asyncio.create_task(link.run())
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert heard == [str(number) for number in range(500)]
