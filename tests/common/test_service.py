"""How a process begins and ends."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from motet import read_settings
from motet.errors import SetupError
from motet.service_main import run_until
from motet.settings import RENAMED, Addresses, Database, ProcessSettings
from tests.common.waiting import PATIENCE_S, until

SERVE = """
import asyncio, gc, sys
from motet.errors import SetupError
from motet.read_settings import read
from motet.service_main import run
from motet.settings import ProcessSettings

async def main(stop, registry, health):
    if sys.argv[1] == "fail":
        raise SetupError("the moon is missing. Hang it up first.")
    if sys.argv[1] in ERRORS:
        def fail():
            raise ERRORS[sys.argv[1]]
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0.01)
        return
    if sys.argv[1] == "count":
        print(len(gc.get_objects()), gc.get_freeze_count())
        return
    print("ready", flush=True)
    await stop.wait()

ERRORS = {"cancelled": asyncio.CancelledError(), "wrong": ValueError("a defect")}

run("tester", read(ProcessSettings), main)
"""


def process(word: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVE, word],
        env={"PATH": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_in_order(signum: signal.Signals) -> None:
    with process("serve") as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signum)
        _, logged = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 0
        assert "stopped" in logged


def test_a_cancelled_task_at_the_end_is_not_an_error_but_a_failure_is() -> None:
    for word, traceback in (("cancelled", False), ("wrong", True)):
        with process(word) as child:
            _, logged = child.communicate(timeout=PATIENCE_S)
            assert child.returncode == 0
            assert ("Traceback" in logged) is traceback, logged


def test_collections_do_not_visit_what_was_imported() -> None:
    with process("count") as child:
        counted, _ = child.communicate(timeout=PATIENCE_S)
        visited, imported = map(int, counted.split())
        assert visited < imported / 5


def test_a_setup_error_is_the_last_line_and_gives_status_2() -> None:
    with process("fail") as child:
        _, logged = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 2
        assert logged.splitlines()[-1] == "tester: the moon is missing. Hang it up first."
        assert "Traceback" not in logged


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MOTET_TIME_SCALE", "0", "MOTET_TIME_SCALE is '0': Input should be greater than 0."),
        ("MOTET_TIME_SCALE", "fast", "MOTET_TIME_SCALE is 'fast': Input should be a valid number"),
        ("MOTET_LOG_LEVEL", "loud", "MOTET_LOG_LEVEL is 'loud': Input should be 'debug', 'info'"),
    ],
)
def test_a_wrong_variable_is_named_with_its_value(name: str, value: str, said: str) -> None:
    with process("serve", **{name: value}) as child:
        _, logged = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 2
        assert said in logged
        assert "Traceback" not in logged


def test_a_variable_that_has_a_new_name_is_not_ignored() -> None:
    old, new = next(iter(RENAMED.items()))
    with process("fail", **{old: "1"}) as child:
        _, logged = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 2
        assert logged.splitlines()[-1] == f"{old} is now called {new}: set that instead."


def test_an_address_for_metrics_that_cannot_be_served_is_a_setup_error() -> None:
    with process("serve", MOTET_METRICS_ADDRESS="unix:/nowhere/m.sock") as child:
        _, logged = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 2
        assert "MOTET_METRICS_ADDRESS" in logged.splitlines()[-1]


async def test_work_runs_until_stop_is_set_and_is_then_cancelled() -> None:
    stop, cancelled = asyncio.Event(), []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    running = asyncio.create_task(run_until(stop, work("a"), work("b")))
    await asyncio.sleep(0)
    stop.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert sorted(cancelled) in ([], ["a", "b"])  # a task that had not begun is not cancelled


async def test_the_first_failure_cancels_the_rest_and_is_raised_as_itself() -> None:
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise SetupError("no")

    with pytest.raises(SetupError, match="no"):
        await run_until(asyncio.Event(), wait(), fail())
    assert cancelled.is_set()


async def test_cancelling_it_cancels_the_work() -> None:
    begun, ended = [], []

    async def work() -> None:
        begun.append(1)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    running = asyncio.create_task(run_until(asyncio.Event(), work()))
    await until(lambda: begun)
    running.cancel()
    (outcome,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError)
    assert ended == [1]


def test_settings_come_from_the_environment_and_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOTET_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("MOTET_SCHEDULER_ADDRESS", "unix:/run/s.sock")
    process = ProcessSettings()
    assert process.cache_dir == tmp_path / "cache"
    assert Addresses().scheduler_address == "unix:/run/s.sock"
    with pytest.raises(ValueError, match="frozen"):
        process.data_dir = Path("elsewhere")  # type: ignore[misc]


def test_without_a_database_url_it_is_a_file_in_the_state_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = ProcessSettings(data_dir=tmp_path)
    assert Database().url(process) == f"sqlite+aiosqlite:///{tmp_path}/motet.db"
    monkeypatch.setenv("MOTET_DATABASE_URL", "postgresql+asyncpg://db/motet")
    assert Database().url(process) == "postgresql+asyncpg://db/motet"


def test_in_a_pod_the_last_line_is_the_termination_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    monkeypatch.setattr(read_settings, "TERMINATION_LOG", log)
    read_settings.print_reason("nowhere to write")
    assert not log.exists(), "only Kubernetes makes it"
    log.touch()
    read_settings.print_reason("runner: there is no model folder")
    assert log.read_text() == "runner: there is no model folder"
