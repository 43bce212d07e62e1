"""What simulated processes and their network do, and what they never do."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from motet.api.v1 import scheduler_pb2 as api
from motet.transport import CallFailed, ServerStream, StatusCode
from motet.transport.methods import SERVE
from motet_simulator.world import Process, SimulatedDisk, TimeStandsStill, Wires, World, surroundings_of

Main = Callable[[Process], Awaitable[None]]


class Machines:
    """Hosts of a world, each with one process."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.wires = Wires(self.world)
        self.failures: list[str] = []
        self.processes: list[Process] = []

    def start(self, host: str, main: Main, life: int = 0) -> Process:
        process = Process(self.world, self.wires, host, life, main, failed=self.failures.append)  # type: ignore[arg-type]
        self.processes.append(process)
        return process


@pytest.fixture
def machines():
    machines = Machines()
    yield machines
    for process in machines.processes:
        process.close()


def message(text: str) -> api.ServeUp:
    return api.ServeUp(cancel=api.CancelRequest(request=text))


def streams_between(machines: Machines, *, count: int = 100_000) -> tuple[list[str], list[str], list[float]]:
    """A client sends numbers to a server, ten a second. Returns what arrives, how both sides end, and when."""
    heard: list[str] = []
    ends: list[str] = []
    ended_at: list[float] = []

    async def server(process: Process) -> None:
        async def handle(stream: ServerStream) -> None:
            await stream.accept()
            try:
                await stream.receive_all(lambda up: heard.append(up.cancel.request))
            finally:
                ends.append("server")
                ended_at.append(machines.world.now)

        async with process.network.serving("server:1", {SERVE: handle}, grace=0):
            await asyncio.Event().wait()

    async def client(process: Process) -> None:
        async with process.network.channel("server:1") as channel:
            stream = channel.stream(SERVE)
            await stream.connected()
            numbers = iter(range(count))

            async def take() -> api.ServeUp:
                await asyncio.sleep(0.1)
                return message(str(next(numbers)))

            sending = asyncio.create_task(stream.send_all(take))
            try:
                await stream.receive_all(lambda _: None)
            except CallFailed as error:
                ends.append(f"client: {error.code.name}")
                ended_at.append(machines.world.now)
            sending.cancel()
            await asyncio.Event().wait()

    machines.start("server", server)
    machines.start("client", client)
    return heard, ends, ended_at


def test_a_killed_process_runs_nothing_more_not_even_what_it_would_do_at_its_end(machines):
    ran = []

    async def main(process: Process) -> None:
        try:
            ran.append("began")
            await asyncio.sleep(5)
            ran.append("later")
        finally:
            ran.append("finally")

    process = machines.start("a", main)
    machines.world.at(1, process.kill)
    machines.world.run(10)
    assert ran == ["began"]


def test_a_paused_process_does_later_what_was_due(machines):
    times = []

    async def main(process: Process) -> None:
        for _ in range(4):
            await asyncio.sleep(1)
            times.append(machines.world.now)
            came.append(process.loop.arrival)

    came: list[float] = []
    process = machines.start("a", main)
    machines.world.at(1.5, process.pause, 10)
    machines.world.run(20)
    assert times == pytest.approx([1, 11.5, 12.5, 13.5], abs=0.01)
    assert came == pytest.approx([1, 1.5, 12.5, 13.5], abs=0.01), "what waits may have come when the pause began"


def test_clocks_of_two_processes_differ(machines):
    shown = []

    async def main(process: Process) -> None:
        around = surroundings_of(process, SimulatedDisk())
        await asyncio.sleep(100)
        shown.append((machines.world.now, around.clock(), around.wall()))

    machines.start("a", main)
    machines.start("b", main)
    machines.world.run(101)
    assert [len(set(each)) for each in zip(*shown, strict=True)] == [2, 2, 2], "how fast, what it shows, wall clock"
    assert [at for at, _, _ in shown] == pytest.approx([100, 100], abs=0.02)


def test_messages_arrive_in_order_although_their_delays_differ(machines):
    heard, _, _ = streams_between(machines)
    machines.world.run(60)
    assert heard == [str(number) for number in range(len(heard))]
    assert len(heard) > 500


def test_a_stopped_direction_delivers_all_when_it_is_free_again_before_anybody_notices(machines):
    heard, ends, _ = streams_between(machines)
    machines.world.at(10, machines.wires.partition, "client", "server", 4)
    machines.world.run(13)
    before = len(heard)
    assert before < 101
    machines.world.run(18)
    assert len(heard) > before + 30
    assert heard == [str(number) for number in range(len(heard))]
    assert ends == []


def heard_beside_a_successor(machines: Machines) -> list[tuple[int, str]]:
    """A client numbers its messages. When it notices a partition, it goes on over another stream. What arrives, with
    the number of its stream."""
    heard: list[tuple[int, str]] = []
    opened = 0

    async def server(process: Process) -> None:
        async def handle(stream: ServerStream) -> None:
            nonlocal opened
            opened += 1
            number = opened
            await stream.accept()
            await stream.receive_all(lambda up: heard.append((number, up.cancel.request)))

        async with process.network.serving("server:1", {SERVE: handle}, grace=0):
            await asyncio.Event().wait()

    async def client(process: Process) -> None:
        sent = 0

        async def take() -> api.ServeUp:
            nonlocal sent
            await asyncio.sleep(0.1)
            sent += 1
            return message(f"{sent:03}")

        async with process.network.channel("server:1") as channel:
            for _ in range(2):
                stream = channel.stream(SERVE)
                sending = asyncio.create_task(stream.send_all(take))
                with suppress(CallFailed):
                    await stream.receive_all(lambda _: None)
                sending.cancel()

    machines.start("server", server)
    machines.start("client", client)
    machines.world.at(10, machines.wires.partition, "client", "server", 7.5)
    machines.world.run(30)
    return heard


def test_after_a_partition_messages_of_a_stream_that_was_given_up_may_come_after_the_first_of_the_next():
    late = []
    for seed in range(20):
        machines = Machines(seed)
        heard = heard_beside_a_successor(machines)
        for process in machines.processes:
            process.close()
        for number in (1, 2):
            of_stream = [text for one, text in heard if one == number]
            assert of_stream == sorted(of_stream)
        late.append(heard != sorted(heard, key=lambda one: one[1]))
    assert {True, False} == set(late)


def test_both_sides_notice_a_long_partition_within_ten_seconds_each_at_its_own_time(machines):
    _, ends, ended_at = streams_between(machines)
    machines.world.at(10, machines.wires.partition, "server", "client", 100)
    machines.world.run(21)
    assert sorted(ends) == ["client: UNAVAILABLE", "server"]
    assert all(15 <= at <= 20.1 for at in ended_at)
    assert len(set(ended_at)) == 2


def test_a_break_loses_what_is_under_way(machines):
    heard, ends, _ = streams_between(machines)
    machines.world.at(10, machines.wires.break_streams, "client", "server")
    machines.world.run(21)
    assert sorted(ends) == ["client: UNAVAILABLE", "server"]
    assert len(heard) < 101


def test_a_machine_without_power_says_nothing_and_a_killed_process_is_noticed_at_once(machines):
    _, ends, ended_at = streams_between(machines)
    machines.world.at(10, machines.processes[0].kill)
    machines.world.run(30)
    assert (ends, ended_at[0]) == (["client: UNAVAILABLE"], pytest.approx(10, abs=0.4))
    other = Machines()
    _, ends, ended_at = streams_between(other)
    other.world.at(10, lambda: other.processes[0].kill(power=True))
    other.world.run(30)
    assert ends == ["client: UNAVAILABLE"]
    assert 15 <= ended_at[0] <= 20.1
    for process in other.processes:
        process.close()


def test_a_short_partition_does_not_end_a_longer_one(machines):
    heard, ends, _ = streams_between(machines)
    machines.world.at(10, machines.wires.partition, "client", "server", 50)
    machines.world.at(12, machines.wires.partition, "client", "server", 1)
    machines.world.run(21)
    assert len(heard) < 101
    assert sorted(ends) == ["client: UNAVAILABLE", "server"]


def test_a_short_slowness_does_not_end_a_longer_one(machines):
    wires = machines.wires
    fast = wires.delay("client", "server", "message")
    machines.world.at(1, wires.slow, "client", "server", 9)
    machines.world.at(2, wires.slow, "client", "server", 1)
    delays = []
    for at in (0, 5, 11):
        machines.world.at(at, lambda: delays.append(wires.delay("client", "server", "message")))
    machines.world.run(12)
    assert delays == [fast, pytest.approx(100 * fast), fast]


def test_partitions_that_overlap_are_noticed_as_one(machines):
    _, ends, ended_at = streams_between(machines)
    machines.world.at(10, machines.wires.partition, "client", "server", 4)
    machines.world.at(13.9, machines.wires.partition, "client", "server", 50)
    machines.world.run(30)
    assert len(ends) == 2
    assert all(15 <= at <= 20.1 for at in ended_at), "after the first, not after the second began"


def connections(machines: Machines, *, at: float) -> list[tuple[str, float]]:
    """How attempts of a client to connect to server:1 end, one from this time on, and after how many seconds."""
    ends: list[tuple[str, float]] = []

    async def client(process: Process) -> None:
        await asyncio.sleep(at)
        began = machines.world.now
        async with process.network.channel("server:1") as channel:
            try:
                await channel.stream(SERVE).connected()
                ends.append(("connected", machines.world.now - began))
            except CallFailed as error:
                ends.append((error.details, machines.world.now - began))
        await asyncio.Event().wait()

    machines.start("client", client)
    return ends


def test_a_machine_without_power_is_silent_and_one_with_power_refuses(machines):
    async def server(process: Process) -> None:
        await asyncio.Event().wait()

    process = machines.start("server", server)
    ends = connections(machines, at=2)
    machines.world.at(1, lambda: process.kill(power=True))
    machines.world.run(40)
    assert ends == [("connection timed out", pytest.approx(20, abs=0.5))]
    other = Machines()
    ends = connections(other, at=2)
    other.start("server", server)
    other.world.run(40)
    assert ends == [("connection refused", pytest.approx(0, abs=0.5))]
    machines.processes += other.processes


def test_a_machine_that_has_power_again_refuses(machines):
    async def server(process: Process) -> None:
        await asyncio.Event().wait()

    process = machines.start("server", server)
    ends = connections(machines, at=3)
    machines.world.at(1, lambda: process.kill(power=True))
    machines.world.at(2, lambda: machines.start("server", server, 1))
    machines.world.run(40)
    assert ends == [("connection refused", pytest.approx(0, abs=0.5))]


@pytest.mark.parametrize("way", [("client", "server"), ("server", "client")])
def test_a_refusal_does_not_pass_a_partition(machines, way):
    machines.wires.partition(*way, 4)
    ends = connections(machines, at=1)
    machines.world.run(10)
    assert ends == [("connection refused", pytest.approx(4.5, abs=1.6))]


@pytest.mark.parametrize("way", [("client", "server"), ("server", "client")])
def test_a_stream_that_begins_behind_a_partition_is_given_up(machines, way):
    async def server(process: Process) -> None:
        async def handle(stream: ServerStream) -> None:
            await stream.accept()

        async with process.network.serving("server:1", {SERVE: handle}, grace=0):
            await asyncio.Event().wait()

    machines.start("server", server)
    machines.wires.partition(*way, 60)
    ends = connections(machines, at=1)
    machines.world.run(70)
    assert ends == [("ping timeout", pytest.approx(7.5, abs=2.6))]


def test_refused_connections_leave_nothing_behind(machines):
    async def main(process: Process) -> None:
        for _ in range(50):
            async with process.network.channel("nobody:1") as channel:
                with suppress(CallFailed):
                    await channel.stream(SERVE).connected()
        await asyncio.Event().wait()

    machines.start("a", main)
    machines.world.run(30)
    assert [len(machines.wires.host(name).streams) for name in ("a", "nobody", "")] == [0, 0, 0]


def test_a_sender_waits_for_a_reader_that_does_not_read(machines):
    sent = 0

    async def server(process: Process) -> None:
        async def handle(stream: ServerStream) -> None:
            await stream.accept()
            await asyncio.Event().wait()

        async with process.network.serving("server:1", {SERVE: handle}, grace=0):
            await asyncio.Event().wait()

    async def client(process: Process) -> None:
        async with process.network.channel("server:1") as channel:
            stream = channel.stream(SERVE)

            async def take() -> api.ServeUp:
                nonlocal sent
                sent += 1
                return message("x" * 10_000)

            await stream.send_all(take)

    machines.start("server", server)
    machines.start("client", client)
    machines.world.run(5)
    assert 20 < sent < 40


def test_processes_that_wake_each_other_without_end_are_found(machines):
    async def main(process: Process) -> None:
        while True:
            await asyncio.sleep(0)

    machines.start("a", main)
    with pytest.raises(TimeStandsStill, match=r"<a\.0, next: the task 'a\.0'>"):
        machines.world.run(1)


def test_a_draw_depends_on_nothing_but_its_seed_and_its_purpose():
    one, other = World(7), World(7)
    other.draw("something else")
    assert one.draw("delay", "a", 3) == other.draw("delay", "a", 3) != World(8).draw("delay", "a", 3)


def test_a_lock_ends_with_its_process_and_files_do_not(machines):
    disk = SimulatedDisk()
    terms = []

    async def main(process: Process) -> None:
        around = surroundings_of(process, disk)
        file = around.disk.lock("term")  # type: ignore[arg-type]
        terms.append(int(file.read() or 0))
        file.write(b"%d" % (terms[-1] + 1))
        with suppress(BlockingIOError):
            around.disk.lock("term")  # type: ignore[arg-type]
            terms.append("locked twice")
        await asyncio.Event().wait()

    first = machines.start("a", main)
    machines.world.at(1, first.kill)
    machines.world.at(2, lambda: machines.start("a", main, 1))
    machines.world.run(3)
    assert terms == [0, 1]
    assert machines.failures == []


def test_an_ended_process_writes_nothing_and_unlocks_nothing(machines):
    disk = SimulatedDisk()

    async def main(process: Process) -> None:
        around = surroundings_of(process, disk)
        held = around.disk.lock("lock")  # type: ignore[arg-type]
        around.disk.replace("kept", b"before")  # type: ignore[arg-type]
        if process.life == 0:
            await asyncio.sleep(1)
            process.kill()
            machines.start("a", main, 1)
            around.disk.replace("kept", b"after")  # type: ignore[arg-type]
            around.disk.remove("kept")  # type: ignore[arg-type]
            held.write(b"after")
            held.close()
        await asyncio.Event().wait()

    machines.start("a", main)
    machines.world.run(3)
    assert disk.files == {"kept": b"before"}
    with pytest.raises(BlockingIOError):
        disk.lock("lock", machines.processes[0])  # type: ignore[arg-type]


def test_a_wall_clock_stays_wrong_when_its_process_starts_again(machines):
    shown = []

    async def main(process: Process) -> None:
        shown.append(surroundings_of(process, SimulatedDisk()).wall() - machines.world.now)
        process.machine.wall_error += 100
        await asyncio.Event().wait()

    first = machines.start("a", main)
    machines.world.at(1, first.kill)
    machines.world.at(2, lambda: machines.start("a", main, 1))
    machines.world.run(3)
    assert shown[1] - shown[0] == pytest.approx(100)


def test_what_a_closed_process_would_still_do_makes_no_real_event_loop(machines, monkeypatch):
    made = []
    monkeypatch.setattr(asyncio.get_event_loop_policy(), "new_event_loop", lambda: made.append("one"))

    async def main(process: Process) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.gather()
            made.append("ended")

    process = machines.start("a", main)
    machines.world.run(1)
    process.close()
    assert made == ["ended"]


def test_names_do_not_depend_on_other_chance(machines):
    async def main(process: Process) -> None:
        await asyncio.Event().wait()

    process = machines.start("a", main)
    one, other = (surroundings_of(process, SimulatedDisk()) for _ in range(2))
    other.random.random()
    assert one.new_id(8) == other.new_id(8)


def test_nobody_at_an_address_is_refused_at_once(machines):
    codes = []

    async def main(process: Process) -> None:
        async with process.network.channel("nobody:1") as channel:
            with pytest.raises(CallFailed) as failed:
                await channel.stream(SERVE).connected()
            codes.append((failed.value.code, machines.world.now < 1))

    machines.start("a", main)
    machines.world.run(1)
    assert codes == [(StatusCode.UNAVAILABLE, True)]


async def fail() -> None:
    raise KeyError("gone")


def test_a_task_that_fails_unnoticed_is_objected_to(machines):
    async def main(process: Process) -> None:
        kept = asyncio.create_task(fail(), name="background")
        await asyncio.Event().wait()
        del kept

    machines.start("a", main)
    machines.world.run(1)
    assert machines.failures == ["nobody notices that the task 'background' has failed: KeyError('gone')"]


def test_a_task_whose_error_is_taken_is_not_objected_to(machines):
    async def main(process: Process) -> None:
        waiting = asyncio.gather(asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(5)))
        with suppress(KeyError):
            await waiting
        with suppress(KeyError):
            await asyncio.create_task(fail())
        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
        await asyncio.Event().wait()

    machines.start("a", main)
    machines.world.run(9)
    assert machines.failures == []


def test_each_turn_is_followed_by_its_checks_but_not_one_in_which_the_process_is_killed(machines):
    checked = []

    async def main(process: Process) -> None:
        await asyncio.Event().wait()

    process = machines.start("a", main)
    process.loop.after_turn = lambda: checked.append(machines.world.now)
    for at in (1, 2, 3):
        machines.world.at(at, process.loop.call_soon, lambda: None)
    machines.world.at(4, process.loop.call_soon, process.kill)
    machines.world.at(5, process.loop.call_soon, lambda: None)
    machines.world.run(6)
    assert checked == [0, 1, 2, 3]


def files_after_power_loss(seeds: range) -> list[dict[str, bytes]]:
    """A machine with an old write and new ones goes off."""
    found = []
    for seed in seeds:
        disk = SimulatedDisk()

        async def main(process: Process, disk: SimulatedDisk = disk) -> None:
            around = surroundings_of(process, disk)
            around.disk.replace("old", b"1")  # type: ignore[arg-type]
            await asyncio.sleep(10)
            around.disk.replace("new", b"1")  # type: ignore[arg-type]
            around.disk.replace("new", b"2")  # type: ignore[arg-type]
            around.disk.lock("synced").write(b"2")  # type: ignore[arg-type]
            await asyncio.Event().wait()

        machine = Machines(seed)
        process = machine.start("a", main)
        machine.world.run(11)
        process.kill(power=True)
        disk.lose_unsynced(machine.world)
        found.append(disk.files)
        process.close()
    return found


def test_a_machine_that_goes_off_may_lose_what_was_written_a_moment_ago_without_a_sync():
    found = files_after_power_loss(range(40))
    assert {files.get("new") for files in found} == {None, b"", b"1", b"2"}
    assert all((files["old"], files["synced"]) == (b"1", b"2") for files in found)


def test_a_process_may_be_killed_inside_a_write_before_or_after_the_file_has_changed():
    found = set()
    for seed in range(20):
        disk, machine, went_on = SimulatedDisk(), Machines(seed), []

        async def main(process: Process, disk: SimulatedDisk = disk, went_on: list[int] = went_on) -> None:
            around = surroundings_of(process, disk)
            around.disk.replace("a", b"1")  # type: ignore[arg-type]
            disk.kill_in_write = process.kill
            around.disk.replace("a", b"2")  # type: ignore[arg-type]
            around.disk.replace("a", b"3")  # type: ignore[arg-type]
            await asyncio.sleep(0)
            went_on.append(1)

        process = machine.start("a", main)
        machine.world.run(1)
        process.close()
        assert went_on == machine.failures == []
        found.add(disk.files["a"])  # type: ignore[index]
    assert found == {b"1", b"2"}
