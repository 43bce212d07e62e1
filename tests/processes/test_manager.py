"""The process manager, with real and small child processes."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from motet.clock import monotonic
from motet.processes import (
    LifecycleConfig,
    Phase,
    ProcessIdentity,
    ProcessManager,
    ProcessRecords,
    ProcessSpec,
    ProcessStatus,
    RestartBackoff,
    identity_of,
    is_alive,
)
from motet.processes.linux import read_stat, session_members
from motet.processes.manager import probe_pause
from motet.telemetry import is_alive as answers
from tests.common.waiting import PATIENCE_S

CONFIG = LifecycleConfig(
    stop_grace=PATIENCE_S, backoff=RestartBackoff(first_delay=0.05, last_delay=0.2, stable_after=0.2)
)

SLEEPER = "import time; time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(60)
"""
SERVER = """
import asyncio, sys
from prometheus_client import CollectorRegistry
from motet.telemetry import serving_metrics

async def serve():
    async with serving_metrics(sys.argv[1], CollectorRegistry()):
        await asyncio.Event().wait()

asyncio.run(serve())
"""
LAST_ACT = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print(time.time_ns())))
print("up", flush=True)
time.sleep(60)
"""


def script(folder: Path, name: str, code: str, **more: object) -> ProcessSpec:
    fields: dict[str, object] = {
        "name": name,
        "kind": "test",
        "command": (sys.executable, "-c", code),
        "log": folder / f"{name}.log",
    }
    return ProcessSpec(**(fields | more))  # type: ignore[arg-type]


@asynccontextmanager
async def process_manager(
    folder: Path, config: LifecycleConfig = CONFIG, clock: Callable[[], float] = monotonic
) -> AsyncIterator[ProcessManager]:
    one = ProcessManager(ProcessRecords(folder / "records"), config=config, clock=clock)
    try:
        yield one
    finally:
        one.kill_all()
        await one.stop_all()


async def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def only(one: ProcessManager) -> ProcessStatus:
    (status,) = one.statuses()
    return status


def pid_of(status: ProcessStatus) -> int:
    assert status.pid is not None
    return status.pid


def identity(status: ProcessStatus) -> ProcessIdentity:
    found = identity_of(pid_of(status))
    assert found is not None
    return found


async def test_a_killed_process_is_back_at_once(tmp_path: Path) -> None:
    async with process_manager(tmp_path, LifecycleConfig(backoff=RestartBackoff(first_delay=3600))) as one:
        one.apply([script(tmp_path, "a", SLEEPER)])
        await until(lambda: only(one).ready)
        first = pid_of(only(one))
        os.kill(first, signal.SIGKILL)
        await until(lambda: only(one).ready and only(one).pid != first)
        assert only(one).restarts == 1
        assert only(one).reason == "killed by SIGKILL"


async def test_a_process_that_cannot_be_watched_at_once_is_kept_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, refusals = os.pidfd_open, [OSError(errno.EMFILE, "Too many open files")] * 2

    def open_later(pid: int, flags: int = 0) -> int:
        if refusals:
            raise refusals.pop()
        return opened(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", open_later)
    monkeypatch.setattr("motet.processes.manager.PROBE_READY_SECONDS", 0.01)
    async with process_manager(tmp_path) as one:
        one.apply([script(tmp_path, "a", SLEEPER)])
        await until(lambda: only(one).ready and not refusals)
        first = pid_of(only(one))
        os.kill(first, signal.SIGKILL)
        await until(lambda: only(one).ready and only(one).pid != first)


async def test_a_killed_process_waits_as_long_as_its_spec_says_then(tmp_path: Path) -> None:
    wait = 3600.0
    async with process_manager(tmp_path) as one:
        one.apply([script(tmp_path, "a", SLEEPER, restart_wait=lambda: wait)])
        await until(lambda: only(one).ready)
        one.kill("a", "the first time")
        await until(lambda: only(one).phase is Phase.WAITING)
        due = one.processes["a"].life.due
        assert due is not None
        assert due > monotonic() + 3000
        wait = 0.0
        one.apply([])
        one.apply([script(tmp_path, "a", SLEEPER, restart_wait=lambda: wait)])
        await until(lambda: only(one).ready)
        one.kill("a", "the second time")
        await until(lambda: only(one).ready and only(one).reason == "the second time")


async def test_a_process_that_keeps_dying_is_restarted_later_each_time(tmp_path: Path) -> None:
    async with process_manager(tmp_path, LifecycleConfig(backoff=RestartBackoff(first_delay=30))) as one:
        one.apply([script(tmp_path, "a", "raise SystemExit('no luck today')")])
        await until(lambda: only(one).failures == 2)
        assert only(one).phase is Phase.WAITING
        assert only(one).restarts == 2
        assert only(one).reason == "no luck today"


async def test_a_setup_errors_last_line_is_the_reason(tmp_path: Path) -> None:
    code = "import sys; print('motet-runner: the model folder /x is missing', file=sys.stderr); sys.exit(2)"
    async with process_manager(tmp_path, LifecycleConfig(backoff=RestartBackoff(first_delay=30))) as one:
        one.apply([script(tmp_path, "a", code)])
        await until(lambda: only(one).failures == 1)
        assert only(one).exit_status == 2
        assert only(one).reason == "motet-runner: the model folder /x is missing"
        assert only(one).phase is Phase.WAITING


async def test_the_probe_decides_readiness(tmp_path: Path) -> None:
    answer, probes = False, 0

    async def probe() -> bool:
        nonlocal probes
        probes += 1
        return answer

    async with process_manager(tmp_path) as one:
        one.apply([script(tmp_path, "a", SLEEPER, probe=probe)])
        await until(lambda: probes >= 3)
        assert only(one).phase is Phase.STARTING
        answer = True
        await until(lambda: only(one).ready)


async def test_who_starts_for_long_is_probed_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each probe takes a minute by this clock."""
    now, starting = [0.0], list[float]()

    async def probe() -> bool:
        now[0] += 60
        return len(starting) == 3

    def pause(seconds: float) -> float:
        starting.append(seconds)
        return 0.01

    monkeypatch.setattr("motet.processes.manager.probe_pause", pause)
    async with process_manager(tmp_path, clock=lambda: now[0]) as one:
        one.apply([script(tmp_path, "a", SLEEPER, probe=probe)])
        await until(lambda: only(one).ready)
    assert starting == [60, 120, 180]
    assert [probe_pause(seconds) for seconds in (0.0, 2.0, 60.0)] == [0.05, 0.05, 1.2]


async def test_stopping_sends_sigterm_and_then_sigkill(tmp_path: Path) -> None:
    async with process_manager(tmp_path, LifecycleConfig(stop_grace=0.2)) as one:
        one.apply([script(tmp_path, "a", DEAF)])
        await until(lambda: "deaf" in (tmp_path / "a.log").read_text())
        process = identity(only(one))
        one.apply([])
        assert only(one).phase is Phase.STOPPING
        await until(lambda: not one.statuses())
        assert not is_alive(process)


async def test_children_of_a_process_end_with_it(tmp_path: Path) -> None:
    async with process_manager(tmp_path) as one:
        one.apply([script(tmp_path, "a", FAMILY)])
        await until(lambda: only(one).pid is not None and len(session_members(identity(only(one)))) == 2)
        members = session_members(identity(only(one)))
        os.kill(pid_of(only(one)), signal.SIGKILL)
        await until(lambda: not any(is_alive(member) for member in members))


async def test_a_changed_command_replaces_the_process(tmp_path: Path) -> None:
    async with process_manager(tmp_path) as one:
        one.apply([script(tmp_path, "a", SLEEPER)])
        await until(lambda: only(one).ready)
        first = identity(only(one))
        one.apply([script(tmp_path, "a", SLEEPER, env={"COLOUR": "blue"})])
        await until(lambda: one.statuses() and only(one).ready and only(one).pid != first.pid)
        assert not is_alive(first)
        assert b"COLOUR=blue" in Path(f"/proc/{only(one).pid}/environ").read_bytes()


async def test_everything_stops_in_its_order(tmp_path: Path) -> None:
    async with process_manager(tmp_path) as one:
        one.apply([script(tmp_path, name, LAST_ACT, stop_order=order) for order, name in enumerate("abc")])
        await until(
            lambda: all(
                (tmp_path / f"{name}.log").exists() and "up" in (tmp_path / f"{name}.log").read_text() for name in "abc"
            )
        )
        await one.stop_all()
        ended = [int((tmp_path / f"{name}.log").read_text().split()[-1]) for name in "abc"]
        assert ended == sorted(ended)


async def test_the_next_process_manager_adopts_what_still_runs_and_starts_what_does_not(tmp_path: Path) -> None:
    specs = [script(tmp_path, "a", SLEEPER), script(tmp_path, "b", SLEEPER)]
    async with process_manager(tmp_path) as first:
        first.apply(specs)
        await until(lambda: all(status.ready for status in first.statuses()))
        before = {status.name: pid_of(status) for status in first.statuses()}
        children = [process.child for process in first.processes.values()]
        first.release()
        os.kill(before["b"], signal.SIGKILL)
        # On a busy machine it is there for a moment after that.
        await asyncio.to_thread(os.waitid, os.P_PID, before["b"], os.WEXITED | os.WNOWAIT)
        async with process_manager(tmp_path) as second:
            second.adopt(specs)
            assert (only(second).pid, only(second).ready) == (before["a"], True), "known before anything is started"
            second.apply(specs)
            await until(lambda: all(status.ready for status in second.statuses()))
            after = {status.name: status for status in second.statuses()}
            assert after["a"].pid == before["a"]
            assert after["a"].restarts == 0
            assert after["b"].pid != before["b"]
            assert after["b"].restarts == 1
            # An adopted process is nobody's child here: its death is seen all the same.
            os.kill(before["a"], signal.SIGKILL)
            await until(lambda: {status.name: status for status in second.statuses()}["a"].restarts == 1)
        for child in children:
            assert child is not None
            child.wait()


async def test_a_pid_that_now_belongs_to_another_process_is_not_adopted(tmp_path: Path) -> None:
    records = ProcessRecords(tmp_path / "records")
    async with process_manager(tmp_path) as one:
        one.apply([script(tmp_path, "a", SLEEPER), script(tmp_path, "b", SLEEPER)])
        await until(lambda: all(status.ready for status in one.statuses()))
        content = (tmp_path / "records" / "a.json").read_text()
        record = records.read()["a"]
        forged = content.replace(str(record.start_ticks), str(record.start_ticks - 7))
        children = [process.child for process in one.processes.values()]
        one.release()
        (tmp_path / "records" / "a.json").write_text(forged)
        async with process_manager(tmp_path) as second:
            second.apply([script(tmp_path, "a", SLEEPER), script(tmp_path, "b", SLEEPER)])
            await until(lambda: all(status.ready for status in second.statuses()))
            assert {s.name: s for s in second.statuses()}["a"].pid != record.pid
            # The old one had lost its record and was found by its environment.
            await until(lambda: not is_alive(record.identity))
        for child in children:
            assert child is not None
            child.wait()


async def test_records_of_an_ended_stack_are_ignored(tmp_path: Path) -> None:
    async with process_manager(tmp_path) as one:
        one.apply([script(tmp_path, "a", SLEEPER)])
        await until(lambda: only(one).ready)
        saved = (tmp_path / "records" / "a.json").read_bytes()
    (tmp_path / "records" / "a.json").write_bytes(saved)
    async with process_manager(tmp_path) as second:
        second.apply([script(tmp_path, "a", SLEEPER)])
        await until(lambda: only(second).ready)
        assert only(second).restarts == 0


async def test_a_command_that_does_not_exist_is_a_reason_and_no_crash(tmp_path: Path) -> None:
    async with process_manager(tmp_path, LifecycleConfig(backoff=RestartBackoff(first_delay=30))) as one:
        one.apply([ProcessSpec(name="a", kind="test", command=("/no/such/program",), log=tmp_path / "a.log")])
        await until(lambda: only(one).failures == 2)
        assert only(one).reason.startswith("/no/such/program cannot be started: ")


async def test_a_zombie_counts_as_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])  # noqa: ASYNC220 - nobody shall wait for it
    found = identity_of(child.pid)
    assert found is not None
    await until(lambda: Path(f"/proc/{child.pid}/stat").read_text().split(")")[1].split()[0] == "Z")
    assert not is_alive(found)
    child.wait()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"name": "a"}'])
def test_an_unreadable_record_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert ProcessRecords(tmp_path).read() == {}


async def test_a_process_that_is_killed_for_a_reason_comes_back_and_tells_it(tmp_path: Path) -> None:
    async with process_manager(tmp_path) as one:
        one.apply([script(tmp_path, "a", FAMILY)])
        await until(lambda: only(one).ready and len(session_members(identity(only(one)))) == 2)
        first = identity(only(one))
        os.kill(first.pid, signal.SIGSTOP)
        one.kill("a", "it hangs")
        await until(lambda: only(one).ready and only(one).pid != first.pid)
        assert (only(one).restarts, only(one).reason) == (1, "it hangs")
        assert session_members(first) == []
        one.kill("nobody", "there is none")


async def test_a_process_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/m.sock"
    async with process_manager(tmp_path, replace(CONFIG, liveness_seconds=2.0)) as one:
        command = (sys.executable, "-c", SERVER, address)
        one.apply(
            [ProcessSpec(name="a", kind="t", command=command, log=tmp_path / "a.log", alive=lambda: answers(address))]
        )
        await until(lambda: one.processes["a"].life.was_alive)
        first = identity(only(one))
        os.kill(first.pid, signal.SIGSTOP)
        await until(lambda: only(one).restarts and one.processes["a"].life.was_alive)
        assert only(one).pid != first.pid
        assert only(one).reason == "it did not answer for 2 s"
        assert not is_alive(first)


async def test_a_stopped_process_that_is_to_be_replaced_then_does_not_wait_for_liveness_probes(tmp_path: Path) -> None:
    async def answers_at_once() -> bool:
        found = read_stat(pid_of(only(one)))
        return found is not None and found.state != "T"

    async with process_manager(tmp_path, replace(CONFIG, stopped_seconds=0.2)) as one:
        one.apply([script(tmp_path, "a", SLEEPER, probe=answers_at_once, replace_stopped=True)])
        await until(lambda: only(one).ready)
        first = identity(only(one))
        os.kill(first.pid, signal.SIGSTOP)
        await until(lambda: only(one).ready and only(one).pid != first.pid)
        assert (only(one).restarts, only(one).reason) == (1, "it was stopped by SIGSTOP")


async def test_a_process_stopped_by_sigstop_is_killed_after_its_grace_period(tmp_path: Path) -> None:
    async with process_manager(tmp_path, replace(CONFIG, stop_grace=0.2)) as one:
        one.apply([script(tmp_path, "a", SLEEPER)])
        await until(lambda: only(one).ready)
        os.kill(pid_of(only(one)), signal.SIGSTOP)
        one.apply([])
        await until(lambda: not one.statuses())
