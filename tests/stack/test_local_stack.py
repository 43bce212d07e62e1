"""A stack from `motet up` to `motet down`, as a user sees it, also when processes die."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from motet.processes.linux import all_stats
from testbed.local_stack import BUNDLED, MOTET, LocalStack, copy_of_bundled, running_stack, write_adapter
from testbed.ports import free_port
from testbed.tree import ROOT
from tests.docs.blocks import Python, Shell, blocks, type_page

pytestmark = pytest.mark.stack

QUESTION = "Who rules Harrow?"
README = ROOT / "README.md"


SERVICES = {"operator", "gateway", "scheduler", "predictor", "supervisor", "runner"}


@pytest.fixture(scope="module")
def one_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """One stack for all tests that can run in any order: its start takes longer than most of them."""
    (folder := tmp_path_factory.mktemp("stack") / "a b").mkdir()
    manifests = copy_of_bundled(folder / "manifests", adapters=["pirate", "shouting"])
    with running_stack(folder, manifests=manifests) as stack:
        yield stack
        # Half of the stack is dead, with the parent and the operator: `down` needs none of them.
        kill_parent(stack)
        for name in ("operator", "scheduler"):
            stack.kill(name)
    assert stack.motet("status").returncode == 1


@pytest.fixture
def shared(one_stack: LocalStack) -> LocalStack:
    """The stack at the start of each test: one runner, two adapters, and no process starts or ends."""

    def is_ready() -> bool:
        status = one_stack.status()
        services = status["services"]
        return (
            sorted(one["kind"] for one in services) == sorted(SERVICES)
            and all(one["ready"] for one in [*services, *status["pools"], *status["adapters"]])
            and len(status["adapters"]) == 2
        )

    one_stack.until(is_ready)
    return one_stack


def test_two_adapters_answer_and_ctrl_c_stops_everything(tmp_path: Path) -> None:
    stack = LocalStack(tmp_path)
    front = subprocess.Popen(
        [*MOTET, *stack.up_arguments(), "--data-dir", str(stack.data)],
        env=stack.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert front.stdout is not None
        output = ""
        while "Ctrl-C stops everything" not in output:
            line = front.stdout.readline()
            assert line, output
            output += line
        # A busy machine may print this before the adapters are checked. The base model is one more to ask.
        models = len([*(BUNDLED / "adapters").iterdir()]) + 1
        assert output.count("curl ") == min(2, models - output.count(" is not ready"))
        assert_working(stack)
        os.killpg(front.pid, signal.SIGINT)
        output += front.stdout.read()
        assert front.wait(30) == 0, output
        assert " computes with " in output
        assert not stack.processes()
        assert not stack.sockets()
    finally:
        front.kill()
        front.wait()
        front.stdout.close()  # type: ignore[union-attr]
        stack.down()


def assert_working(stack: LocalStack) -> None:
    # Checks of adapters leave the processors to all that runs: on a busy machine `motet up` does not wait for them.
    stack.until(lambda: all(adapter["ready"] for adapter in stack.status()["adapters"]))
    status = json.loads(stack.motet("status", "--json").stdout)
    assert stack.status().keys() == {"services", "pools", "adapters", "runners", "problems", "url"}
    assert status.keys() - stack.status().keys() == {"answers", "weights_made"}, "from the metrics of running services"
    assert {one["kind"] for one in status["services"]} == SERVICES
    assert all(one["ready"] for one in status["services"])
    assert [(pool["ready"], pool["replicas"]) for pool in status["pools"]] == [(1, 1)]
    assert all(adapter["ready"] for adapter in status["adapters"])
    stack.until(lambda: stack.status()["runners"])
    (runner,) = stack.status()["runners"]
    assert runner["name"] == stack.service("runner")["name"]
    assert runner["kernels"]["serving"].partition(" ")[0] in {"torch", "cpp"}
    assert runner["kernels"]["since"][:2] == "20"
    pirate, shouting = stack.ask("default/pirate", QUESTION), stack.ask("default/shouting", QUESTION)
    assert pirate != shouting
    assert shouting == shouting.upper()
    stack.until(lambda: any(place["tier"] == "device" for place in stack.adapter("pirate")["resident"]))
    assert stack.adapter("pirate")["certificate"]["rank"] > 0

    second = stack.motet("up", "--port", str(free_port()))
    assert second.returncode == 2
    assert stack.url in second.stderr
    assert f"motet down --data-dir {stack.data}" in second.stderr

    answer = stack.motet("chat", "default/shouting", "--temperature", "0", "-m", QUESTION)
    assert answer.returncode == 0
    assert answer.stdout.strip() == answer.stdout.strip().upper()


def test_the_readme_shows_what_is_printed(shared: LocalStack, tmp_path: Path) -> None:
    """Its console and Python blocks, and its request with curl, at the port of this stack."""
    here = [replace(block, text=block.text.replace("http://127.0.0.1:8000", shared.url)) for block in blocks(README)]
    env = shared.environment()
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "MOTET_DATA_DIR": str(shared.data)}
    typed = [block for block in here if block.kind in ("console", "python", "text") or block.text.startswith("curl ")]
    assert [block.kind for block in typed] == ["sh", "console", "python", "text"]
    with Shell(tmp_path, scratch=tmp_path, env=env) as shell:
        type_page(typed, shell, Python())


def test_a_request_waits_at_most_ten_seconds_for_a_scheduler_that_is_stopped(shared: LocalStack) -> None:
    """After SIGSTOP a process exists and keeps its sockets, but does not answer; SIGTERM would not end it."""
    stopped, began = shared.kill("scheduler", signal.SIGSTOP), time.monotonic()
    answer = shared.ask("default/shouting", QUESTION)
    waited = time.monotonic() - began
    assert answer == answer.upper()
    assert shared.service("scheduler")["pid"] != stopped
    print(f"frozen_scheduler_s: {waited:.1f}")
    assert waited <= 10.0


def test_a_stopped_process_is_replaced(shared: LocalStack) -> None:
    kill_parent(shared)
    impatient = replace(shared, env={"MOTET_OPERATOR_SILENT_SECONDS": "5"}).up()
    assert impatient.returncode == 0, impatient.stderr
    for names in (("supervisor", "predictor", "gateway"), ("operator",)):
        stopped = {name: shared.kill(name, signal.SIGSTOP) for name in names}

        def back(stopped: dict[str, int] = stopped) -> bool:
            now = {name: shared.service(name) for name in stopped}
            return all(one["ready"] and one["pid"] != stopped[name] for name, one in now.items())

        shared.until(back)
    answer = shared.ask("default/shouting", QUESTION)
    assert answer == answer.upper()
    kill_parent(shared)
    assert shared.up().returncode == 0


@pytest.mark.parametrize("name", ["operator", "gateway", "scheduler", "predictor", "supervisor"])
def test_any_killed_process_is_started_again(name: str, shared: LocalStack) -> None:
    """`test_streams_survive` kills a runner: it has two runners and streams."""
    before = {one["name"]: one for one in shared.status()["services"]}
    killed = shared.kill(name)

    def back() -> bool:
        now = shared.service(name)
        again = now["restarts"] == before[now["name"]]["restarts"] + 1
        return bool(now["ready"] and now["pid"] != killed and again)

    shared.until(back)
    after = {one["name"]: one for one in shared.status()["services"]}
    others = before.keys() - {shared.service(name)["name"]}
    assert {one: after[one]["pid"] for one in others} == {one: before[one]["pid"] for one in others}
    shared.until(lambda: shared.ask("default/pirate", QUESTION))


def test_changes_of_manifests_and_bytes_apply_without_a_restart(shared: LocalStack, tmp_path: Path) -> None:
    assert shared.manifests is not None
    pids = {one["name"]: one["pid"] for one in shared.status()["services"]}
    mine = tmp_path / "mine"  # the stack's folder has a space in its name, which a URI may not contain
    shutil.copytree(BUNDLED / "adapters" / "shouting", mine)
    manifest = write_adapter(shared.manifests, "extra", uri=mine.as_uri())
    shared.until(lambda: any(one["name"] == "extra" and one["ready"] for one in shared.status()["adapters"]))
    first = shared.ask("default/extra", QUESTION)
    assert first == first.upper()

    digest = shared.adapter("extra")["certificate"]["digest"]
    for file in (BUNDLED / "adapters" / "pirate").iterdir():
        shutil.copy(file, mine / file.name)
    shared.until(lambda: (shared.adapter("extra")["certificate"] or {}).get("digest") not in (None, digest))
    shared.until(lambda: shared.ask("default/extra", QUESTION) != first)

    bad = shared.manifests / "bad.yaml"
    bad.write_text("apiVersion: motet.dev/v1alpha1\nkind: LoraAdapter\n")
    shared.until(lambda: any("did you mean LoRAAdapter?" in problem for problem in shared.status()["problems"]))
    bad.unlink()
    shared.until(lambda: not shared.status()["problems"])

    manifest.unlink()
    shared.until(lambda: all(one["name"] != "extra" for one in shared.status()["adapters"]))
    assert {one["name"]: one["pid"] for one in shared.status()["services"]} == pids


def kill_parent(stack: LocalStack) -> None:
    parent = next(
        pid for pid in stack.processes() if b"motet_operator.local.parent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(parent, signal.SIGKILL)
    stack.until(lambda: parent not in stack.processes())


def test_up_again_adopts_what_a_killed_parent_left(shared: LocalStack) -> None:
    pids = {one["name"]: one["pid"] for one in shared.status()["services"]}
    kill_parent(shared)
    assert "`motet up` has died" in shared.motet("status").stdout
    assert shared.ask("default/pirate", QUESTION)
    again = shared.up()
    assert again.returncode == 0, again.stderr
    assert {one["name"]: one["pid"] for one in shared.status()["services"]} == pids


def test_ctrl_c_during_an_up_that_adopts_a_stack_ends_only_that(shared: LocalStack) -> None:
    """That `up` asks for another runner: only the operator is replaced."""
    before = {one["name"]: one["pid"] for one in shared.status()["services"]}
    kill_parent(shared)
    with subprocess.Popen(
        [*MOTET, *shared.up_arguments(), "--runners", "2", "--data-dir", str(shared.data)],
        env=shared.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as front:
        try:
            shared.until(lambda: len(shared.status()["services"]) > len(before))
            front.send_signal(signal.SIGINT)
            output, _ = front.communicate(timeout=30)
        finally:
            front.kill()
    assert front.returncode == 130, output
    assert "What ran before goes on." in output
    now = {one["name"]: one["pid"] for one in shared.status()["services"]}
    assert {name for name in before if before[name] != now[name]} == {"operator"}
    assert shared.ask("default/pirate", QUESTION)
    assert shared.up().returncode == 0
    shared.until(lambda: len(shared.status()["services"]) == len(before))


def test_up_never_stops_what_it_adopts_because_something_fails(shared: LocalStack) -> None:
    assert shared.manifests is not None
    services = {one["name"]: one["pid"] for one in shared.status()["services"]}
    pool = json.loads((shared.manifests / "pool.json").read_text())
    pool["metadata"]["name"] = "broken"
    pool["spec"]["model"] |= {"servedName": "broken", "digest": "sha256:" + "0" * 64}
    broken = shared.manifests / "broken.json"
    broken.write_text(json.dumps(pool))
    try:
        shared.until(lambda: any("asks for sha256:000" in one for one in reasons(shared)))
        kill_parent(shared)
        again = shared.motet(*shared.up_arguments(), "--detach", "--runners", "1")
        assert again.returncode == 2, again.stdout
        assert "asks for sha256:000" in again.stderr
        assert "What ran before goes on." in again.stdout
        now = {one["name"]: one["pid"] for one in shared.status()["services"]}
        assert services.items() - now.items() == {("operator", services["operator"])}
        assert shared.ask("default/pirate", QUESTION)
    finally:
        broken.unlink()
        kill_parent(shared)
        assert shared.up().returncode == 0  # without `--runners`: the pool decides again


def reasons(stack: LocalStack) -> list[str]:
    return [one["message"] for pool in stack.status()["pools"] for one in pool["conditions"]]


def test_up_after_everything_was_killed_waits_until_ready_and_reports_a_broken_adapter(
    shared: LocalStack, tmp_path: Path
) -> None:
    assert shared.manifests is not None
    while pids := shared.processes():  # the operator may replace a runner before its own turn comes
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    # A process that is ending has no environment any more, but still lives for a moment.
    shared.until(lambda: not any(one["pid"] for one in shared.status()["services"]))
    dead = shared.status()
    assert not any(one["ready"] for one in dead["services"] + dead["pools"] + dead["adapters"])
    assert f"Start it: motet up --data-dir '{shared.data}'" in shared.motet("status").stdout

    (tmp_path / "empty").mkdir()
    broken = write_adapter(shared.manifests, "broken", uri=(tmp_path / "empty").as_uri())
    again = shared.up()
    assert again.returncode == 0, again.stderr
    assert f"motet chat default/pirate --data-dir '{shared.data}'" in again.stdout
    assert "adapter default/broken is not ready: " in again.stdout
    assert not shared.adapter("broken")["ready"]
    assert shared.ask("default/pirate", QUESTION)
    broken.unlink()
    shared.until(lambda: all(one["name"] != "broken" for one in shared.status()["adapters"]))


def test_runners_are_added_replaced_and_taken_away_while_it_serves(shared: LocalStack) -> None:
    assert shared.manifests is not None
    pool = shared.manifests / "pool.json"

    def declare(replicas: int, **engine: int) -> None:
        content = json.loads(pool.read_text())
        content["spec"]["replicas"] = replicas
        content["spec"]["engine"] |= engine
        temporary = pool.with_name(".pool")
        temporary.write_text(json.dumps(content))
        temporary.rename(pool)

    def runners() -> list[str]:
        return [one["name"] for one in shared.status()["services"] if one["kind"] == "runner" and one["ready"]]

    (first,) = runners()
    declare(2)
    shared.until(lambda: len(runners()) == 2)
    assert first in runners()

    declare(1)
    shared.until(lambda: runners() == [first])
    assert shared.ask("default/pirate", QUESTION)

    declare(1, maxConcurrentSequences=8)
    while runners() == [first] or len(runners()) > 1:
        assert shared.ask("default/pirate", QUESTION)  # surge before drain: there is always one runner
    assert first not in runners()
    shared.until(lambda: [one["ready"] for one in shared.status()["pools"]] == [1])


@pytest.mark.soak  # tests/runner_service has each end of an engine, and test_seeded_causes.py a killed runner's return
def test_a_killed_engine_ends_its_runner_and_both_are_restarted(shared: LocalStack) -> None:
    runner = shared.service("runner")
    os.kill(shared.engine_of(runner["pid"]), signal.SIGKILL)
    shared.until(lambda: shared.service("runner")["restarts"] == runner["restarts"] + 1)
    shared.until(lambda: shared.service("runner")["ready"])
    shared.until(lambda: shared.ask("default/pirate", QUESTION))


def test_no_zombie_process_is_left(shared: LocalStack) -> None:
    """After the tests above, in any order: `motet up` and the operator collect their dead children."""
    ours = set(shared.processes())
    shared.until(lambda: not [stat for stat in all_stats() if stat.dead and stat.parent in ours])


@pytest.mark.parametrize("how", [pytest.param("--detach", marks=pytest.mark.soak), ""])
def test_a_model_with_another_digest_than_the_pools_stops_the_start(tmp_path: Path, how: str) -> None:
    manifests = copy_of_bundled(tmp_path / "manifests", adapters=[])
    pool = json.loads((manifests / "pool.json").read_text())
    pool["spec"]["model"]["digest"] = "sha256:" + "0" * 64
    (manifests / "pool.json").write_text(json.dumps(pool))
    stack = LocalStack(tmp_path, manifests=manifests)
    try:
        failed = stack.motet(*stack.up_arguments(), *([how] if how else []))
        assert failed.returncode == 2, failed.stdout
        assert "asks for sha256:000" in failed.stderr
        assert "Its log: " in failed.stderr
        assert "Traceback" not in failed.stderr
        assert not stack.processes()
        assert not stack.sockets()
    finally:
        stack.down()
