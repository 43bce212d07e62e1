"""What scheduler and supervisor record live is decided again, bit for bit."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from motet.errors import SetupError
from motet.event_record import Write, record_of, recorded
from motet.line_file import LineFile
from motet_cli.main import app
from motet_scheduler.policy.scheduler import Scheduler
from motet_scheduler.policy.values import SchedulerConfig
from motet_scheduler.settings import Settings as SchedulerSettings
from motet_simulator.fake_engine import SlowEngines, tokens_of
from motet_simulator.plan.cluster import Cluster
from motet_simulator.plan.setup import Setup
from motet_simulator.replay import Replayed, replay
from motet_supervisor.policy import events as supervisor_events
from motet_supervisor.policy.supervisor import Supervisor
from motet_supervisor.policy.values import SupervisorConfig
from motet_supervisor.settings import Settings as SupervisorSettings
from tests.simulator.setups import profile, workload
from tests.support.in_process_runner import short_folder
from tests.support.in_process_system import in_process_system


def to(file: Path) -> Write:
    write = record_of(str(file))
    assert write is not None
    return write


def record_both(cluster: Cluster, scheduler: Callable[[bytes], None], supervisor: Callable[[bytes], None]) -> None:
    """As the services do it."""
    setup = cluster.setup
    made_from = {"config": setup.scheduler, "began": 0.0, "saved": cluster.saved, "first_order": 1}
    for policy, write, name, given in (
        (cluster.scheduler, scheduler, "scheduler", made_from),
        (cluster.supervisor, supervisor, "supervisor", {"config": setup.supervisor}),
    ):
        handle: Any = policy.handle
        policy.handle = recorded(handle, write, name, **given)  # type: ignore[attr-defined]


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_a_hundred_recorded_runs_are_decided_again(first: int, tmp_path: Path) -> None:
    """With few pages, so that promises overflow, and requests are parked where promises must fit."""
    scheduler, supervisor = tmp_path / "scheduler", tmp_path / "supervisor"
    seen = ""
    for seed in range(first, first + 25):
        chance = random.Random(seed)
        setup = Setup(
            profile=profile(
                seed=seed,
                preset=chance.choice(["paged-chunk", "paged-promises"]),
                pages=chance.choice([40, 300]),
                max_sequences=8,
                adapter_slots=2,
            ),
            runners=chance.choice([1, 3]),
            seed=seed,
            max_tokens=300,
            supervisor=SupervisorConfig(overcommit=chance.choice([1.0, 1.5])),
            scheduler=SchedulerConfig(force_promise_pages=chance.choice([0, 3])),
        )
        cluster = Cluster(setup, [f"a{number}" for number in range(4)])
        record_both(cluster, to(scheduler), to(supervisor))
        cluster.run(workload(seed, 15, rate=20, adapters=4, blocks=3, output=40))
    for file in (scheduler, supervisor):
        found = replay(file)
        assert (found.difference, found.begun) == ("", 25)
        assert found.events > 1000
        seen += file.read_text()
    for event in ("RequestParked", "OverflowAnnounced", "Resumable", "AdapterStateChanged", "PromiseChanged"):
        assert f'"event":"{event}"' in seen
    result = CliRunner().invoke(app, ["replay", str(scheduler), str(supervisor)])
    assert result.exit_code == 0
    assert result.output.count("all decisions are the same") == 2


async def test_services_record_what_they_decide_over_grpc() -> None:
    """With a scheduler that starts again from its file, and orders from a random number on."""
    with short_folder() as folder:
        scheduler, supervisor = folder / "scheduler-record", folder / "supervisor-record"
        async with in_process_system(
            folder,
            scheduler=SchedulerSettings(record=str(scheduler)),
            supervisor=SupervisorSettings(record=str(supervisor), overcommit=1.5),
        ) as system:
            await system.runner("r0", SlowEngines(0.005, pages=20))
            for turn in range(2):
                answers = [system.gateway.start(f"{turn}-{n}", prompt=(n,), max_tokens=60, q80=20) for n in range(6)]
                for n, answer in enumerate(answers):
                    assert await answer == tokens_of((n,), 7, 60)
                await system.control.restart_scheduler()
        for file, begun in ((scheduler, 3), (supervisor, 1)):
            found = replay(file)
            assert (found.difference, found.begun) == ("", begun)
            assert found.events > 20


def test_a_record_is_its_owners_alone(record: Path) -> None:
    """It has the addresses of adapters, and some of these contain a key."""
    assert record.stat().st_mode & 0o777 == 0o600


def test_a_setting_may_be_infinite(tmp_path: Path) -> None:
    config = SupervisorConfig(hang=math.inf)
    decide = recorded(Supervisor(config).handle, to(tmp_path / "record"), "supervisor", config=config)
    decide(supervisor_events.Tick(), 1.0)
    assert replay(tmp_path / "record") == Replayed(events=1, begun=1)


@pytest.mark.parametrize("late", [math.inf, -math.inf, math.nan])
def test_an_event_may_have_a_number_that_json_lacks(
    late: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is told the same number again."""
    told: list[float] = []

    def handle(_: Supervisor, event: Any, now: float) -> list[Any]:
        told.append(event.late)
        return []

    monkeypatch.setattr(Supervisor, "handle", handle)
    config = SupervisorConfig()
    decide = recorded(Supervisor(config).handle, to(tmp_path / "record"), "supervisor", config=config)
    decide(supervisor_events.Tick(late=late), 1.0)
    assert replay(tmp_path / "record") == Replayed(events=1, begun=1)
    assert repr(told[0]) == repr(told[1])


@pytest.fixture
def record(tmp_path: Path) -> Path:
    file = tmp_path / "record"
    cluster = Cluster(Setup(profile=profile(), runners=2))
    record_both(cluster, to(file), lambda _: None)
    cluster.run(workload(1, 10, rate=20))
    return file


def test_another_decision_is_found_with_its_line(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    first = next(number for number, line in enumerate(lines, 1) if line.get("event") == "Enqueued")
    handle = Scheduler.handle

    def later(self: Scheduler, event: Any, now: float) -> Any:
        return handle(self, event, now)[1:]

    monkeypatch.setattr(Scheduler, "handle", later)
    found = replay(record)
    assert found.difference
    assert int(found.difference.split()[1].rstrip(":")) <= first
    result = CliRunner().invoke(app, ["replay", str(record)])
    assert result.exit_code == 1
    assert "leads to other decisions" in result.output


def test_a_line_that_was_being_written_ends_the_record(record: Path) -> None:
    whole = replay(record).events
    with record.open("ab") as file:
        file.write(b'{"at": 9, "eve')
    assert replay(record).events == whole


def test_a_process_goes_on_with_the_record_of_one_that_was_killed_while_it_wrote(record: Path) -> None:
    whole = replay(record).events
    with record.open("ab") as file:
        file.write(b'{"at": 9, "eve')
    cluster = Cluster(Setup(profile=profile(), runners=2))
    record_both(cluster, to(record), lambda _: None)
    cluster.run(workload(1, 10, rate=20))
    found = replay(record)
    assert (found.difference, found.begun, found.events) == ("", 2, 2 * whole)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1]", "line 1: it is no JSON object"),
        ('{"policy": "supervisor", "form": 6, "config": {}}\n{"at": 1,\n{"at": 1}', "line 2: it is no JSON object"),
        ('{"policy": "supervisor", "form": 6, "config": {}}\n{"at": 1,\n{"at": 1,', "line 2: it is no JSON object"),
        ('{"at": 1, "event": "Tick", "of": {}, "decided": null}', "line 1: .*begins with what its policy"),
        ('{"policy": "x", "form": 6}', "line 1: .*no policy has the name 'x'"),
        (
            '{"policy": "supervisor", "form": 6, "config": {}}\n{"at": 1, "event": "Tock", "of": {}, "decided": ""}',
            "line 2",
        ),
        (
            '{"policy": "supervisor", "form": 6, "config": {}}\n{"at": 1, "event": "field", "of": {}, "decided": ""}',
            "line 2",
        ),
        (
            '{"policy": "supervisor", "form": 6, "config": {}}\n{"at": "a", "event": "Tick", "of": {}, "decided": ""}',
            "line 2",
        ),
    ],
)
def test_what_is_no_record_is_refused(line: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "record"
    file.write_text(line + "\n")
    with pytest.raises(SetupError, match=why):
        replay(file)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({}, "has form 1, and this motet replays form 6. Replay it with the motet that recorded it, or record again"),
        ({"form": 7, "motet": "9.1"}, "has form 7, and this motet replays form 6. Replay it with motet 9.1, or record"),
        ({"form": "6", "motet": 9}, "has form 6, and .* Replay it with the motet that recorded it"),
    ],
)
def test_a_record_of_another_form_is_refused(written: dict[str, Any], said: str, record: Path) -> None:
    """Also behind one of this form, where another motet went on with the file."""
    lines = record.read_text().splitlines()
    head = {name: value for name, value in json.loads(lines[0]).items() if name not in {"form", "motet"}}
    record.write_text("\n".join([*lines, json.dumps(head | written), *lines[1:]]))
    with pytest.raises(SetupError, match=f"line {len(lines) + 1}: this record {said}"):
        replay(record)


def test_a_decision_that_failed_is_recorded_too() -> None:
    lines: list[bytes] = []

    def handle(event: str, now: float) -> list[str]:
        raise ValueError(event, now)

    with pytest.raises(ValueError, match="x"):
        recorded(handle, lines.append, "scheduler")("x", 1.0)
    assert json.loads(lines[1]) == {"at": 1.0, "event": "str", "of": "x", "decided": None}


def test_a_file_that_cannot_be_written_ends_the_record_alone(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "no folder" / "record", stopped="event_record_stopped")
    file.append(b"x")
    assert not file.open
    (tmp_path / "no folder").mkdir()
    file.append(b"y")
    assert not (tmp_path / "no folder" / "record").exists()
