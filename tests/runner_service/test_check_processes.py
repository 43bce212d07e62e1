"""Adapters are checked outside of the service: whatever a check takes, it holds up nobody else."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest
from structlog.testing import capture_logs
from tokenizers import Regex, Tokenizer, models, normalizers

from motet.errors import AdapterFetchFailed, AdapterIncompatible, Internal
from motet_runner.adapters import check_process, check_processes
from motet_runner.adapters.certification import Certification, EngineLimits, certify
from motet_runner.adapters.check_process import decoded, encoded
from motet_runner.adapters.check_processes import LOWEST_PRIORITY, CheckProcesses
from motet_runner.service import CHECK_SHARE
from motet_runner.settings import Settings
from motet_simulator.fake_engine import FakeEngine
from tests.common.waiting import until
from tests.support.in_process_runner import write_adapter

LIMITS = EngineLimits.of_engine(FakeEngine().info)
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def processes():
    processes = CheckProcesses(LIMITS)
    yield processes
    processes.close()


@pytest.fixture
def adapter(tmp_path):
    return write_adapter(tmp_path / "adapter")


def children(of: int | None = None) -> list[Path]:
    """The processes that check for this one, or for process `of`."""
    found, parent = [], of or os.getpid()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            of_parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except (OSError, ValueError):
            continue
        if int(of_parent) == parent and checks(folder):
            found.append(folder)
    return found


def checks(folder: Path) -> bool:
    """False also of a process that has ended and that nobody has waited for."""
    try:
        return b"check_process" in (folder / "cmdline").read_bytes()
    except OSError:
        return False


def with_slow_pattern(folder: Path) -> Path:
    """Its pattern takes until the limit for patterns, a second."""
    return write_adapter(folder, target_modules="(.*)" * 14 + r"\1\2\3\4\5[!?]")


def with_long_header(folder: Path) -> Path:
    """Its header is as long as one may be that is parsed: its values take some 20 MiB."""
    shapes = {f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(18_000)}
    header = json.dumps(shapes, separators=(",", ":")).encode()
    (write_adapter(folder) / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def with_tokenizer(folder: Path, normalizer: normalizers.Normalizer | None = None) -> Path:
    made = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    if normalizer is not None:
        made.normalizer = normalizer
    made.save(str(folder / "tokenizer.json"))
    return folder


def with_slow_tokenizer(folder: Path) -> Path:
    """It changes no text, and takes long."""
    slow = normalizers.Replace(Regex(r"(?:.|.){10}\b\B"), "")
    return with_tokenizer(write_adapter(folder), normalizers.Sequence([slow] * 4000))


def with_large_tokenizer(folder: Path) -> Path:
    """It makes a large text of a small one."""
    return with_tokenizer(write_adapter(folder), normalizers.Sequence([normalizers.Replace("e", "e" * 500)] * 4))


@pytest.mark.parametrize("name", ["x/../../elsewhere", "certificate.json", f"layout-{'0' * 32}.json", 7, None])
def test_a_check_cannot_choose_the_file_that_the_service_writes(adapter, name):
    certification, linears, _ = decoded(encoded(adapter, LIMITS), adapter)
    assert Certification.decode(certification, adapter, linears) == certify(adapter, LIMITS)
    said = json.loads(certification)
    said["layout"]["linears_file"] = name
    with pytest.raises(ValueError, match="not a certificate that Motet has written"):
        Certification.decode(json.dumps(said), adapter, linears)


@pytest.mark.parametrize("name", ["x/../../elsewhere", "certificate.json", "", 7])
def test_a_kept_check_cannot_name_another_file_than_a_layouts(adapter, name):
    said = json.loads(certify(adapter, LIMITS).encode())
    said["layout"]["linears_file"] = name
    with pytest.raises(ValueError, match="not a certificate that Motet has written"):
        Certification.decode(json.dumps(said), adapter)


@pytest.mark.parametrize(
    "fields",
    [7, None, [], {"other": 1}, {"size_bytes": "many"}, {"size_bytes": "-1"}, {"rank": -1}, {"rank": "4"}],
)
def test_a_kept_certificate_has_only_fields_of_a_certificate(adapter, fields):
    said = json.loads(certify(adapter, LIMITS).encode())
    said["certificate"] = {"size_bytes": str(1 << 40)}
    assert Certification.decode(json.dumps(said), adapter).certificate.size_bytes == 1 << 40
    said["certificate"] = fields
    with pytest.raises(ValueError, match="not a certificate that Motet has written"):
        Certification.decode(json.dumps(said), adapter)


def test_a_check_says_what_it_says_in_the_service(processes, adapter):
    assert processes.check(adapter) == certify(adapter, LIMITS)
    assert processes.check(adapter).encode() == certify(adapter, LIMITS).encode()
    assert len(children()) == 1, "one process stays"
    processes.check_whole(adapter)
    (adapter / WEIGHTS).write_bytes(b"12")
    with pytest.raises(AdapterIncompatible, match="cut short"):
        processes.check_whole(adapter)
    with pytest.raises(AdapterIncompatible) as here:
        certify(adapter, LIMITS)
    with pytest.raises(AdapterIncompatible) as there:
        processes.check(adapter)
    assert (there.value.message, there.value.reason, there.value.param) == (
        here.value.message, here.value.reason, here.value.param,
    )  # fmt: skip


def fork_of(process: Path) -> str:
    (fork,) = children(of=int(process.name))
    return fork.name


def test_one_fork_checks_many_until_it_refuses_one(processes, adapter, tmp_path):
    processes.check(adapter)
    (process,) = children()
    first = fork_of(process)
    processes.check(adapter)
    assert fork_of(process) == first
    bad = write_adapter(tmp_path / "bad", r=0)
    with pytest.raises(AdapterIncompatible):
        processes.check(bad)
    assert not children(of=int(process.name))
    processes.check(adapter)
    assert fork_of(process) != first
    assert children() == [process]


def test_only_a_long_header_needs_a_process_to_see_that_the_weights_are_whole(processes, adapter, tmp_path):
    processes.check_whole(adapter)
    assert not children()
    processes.check_whole(with_long_header(tmp_path / "long"))
    assert len(children()) == 1


def test_one_fork_does_not_check_for_ever(processes, tmp_path):
    long, forks = with_long_header(tmp_path / "long"), set()
    for _ in range(check_process.MAX_CHECKS + 1):
        processes.check_whole(long)
        (process,) = children()
        forks |= {fork.name for fork in children(of=int(process.name))}
    assert len(forks) == 2


def test_a_fork_that_was_killed_between_two_checks_costs_one_attempt(processes, adapter):
    processes.check(adapter)
    (process,) = children()
    os.kill(int(fork_of(process)), signal.SIGKILL)
    with pytest.raises(AdapterFetchFailed, match="was killed") as failed:
        processes.check(adapter)
    assert failed.value.retry_after > 0
    assert processes.check(adapter).certificate.rank == 4
    assert children() == [process]


def test_a_disk_that_fails_is_no_fault_of_the_adapter(adapter, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error", "a.safetensors")

    monkeypatch.setattr(check_process, "certify", fail)
    with pytest.raises(OSError, match="Input/output error") as failed:
        decoded(encoded(adapter, LIMITS), adapter)
    assert (failed.value.errno, failed.value.filename) == (errno.EIO, "a.safetensors")


@pytest.mark.parametrize("word", [b'"\\ud800"', b'"\xed\xa0\x80"'], ids=["escaped", "raw"])
def test_half_a_character_is_refused_as_what_it_is(processes, adapter, word):
    """No message could name it: the tenant would not read what is wrong."""
    config = (adapter / "adapter_config.json").read_bytes()
    (adapter / "adapter_config.json").write_bytes(config.rstrip()[:-1] + b', "peft_version": ' + word + b"}")
    with pytest.raises(AdapterIncompatible, match=r"adapter_config\.json is not valid JSON"):
        processes.check(adapter)


def test_a_defect_of_ours_is_no_fault_of_the_adapter(adapter, monkeypatch):
    monkeypatch.setattr(check_process, "certify", lambda *_: 1 / 0)
    said = encoded(adapter, LIMITS)
    assert b"ZeroDivisionError" in said
    with pytest.raises(Internal):
        decoded(said, adapter)


def test_a_process_that_does_not_start_is_said_and_leaves_nothing(adapter, monkeypatch):
    many = {f"model.layers.{number}.self_attn.q_proj": (64, 64) for number in range(10_000)}
    monkeypatch.setattr(sys, "executable", "/bin/false")
    processes = CheckProcesses(LIMITS._replace(target_modules=many))
    with capture_logs() as logs, pytest.raises(AdapterFetchFailed, match="see the runner's log") as failed:
        processes.check(adapter)
    assert failed.value.retry_after > 0
    assert [(line["event"], line["status"]) for line in logs] == [("adapter_checks_ended", 1)]
    assert not children()


def test_a_process_that_has_ended_before_it_is_told_anything_is_said(adapter, monkeypatch):
    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *how, **more):
            super().__init__(*how, **more)
            self.wait()

    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(subprocess, "Popen", Ended)
    with pytest.raises(AdapterFetchFailed, match="see the runner's log"):
        CheckProcesses(LIMITS).check(adapter)


@pytest.mark.parametrize(
    ("make", "bounds", "says"),
    [
        (with_slow_pattern, {"cpu_seconds": 0.3}, "more than 0.3 s of CPU time"),
        (with_long_header, {"memory_bytes": 8 << 20}, "more than 8 MiB of memory"),
    ],
    ids=["time", "memory"],
)
def test_a_check_that_takes_too_much_is_ended_and_the_next_one_goes_on(tmp_path, adapter, make, bounds, says):
    processes, greedy = CheckProcesses(LIMITS, **bounds), make(tmp_path / "greedy")
    try:
        for _ in range(2):
            with pytest.raises(AdapterIncompatible, match=says) as refused:
                processes.check(greedy)
            assert refused.value.reason == "TooLarge"
        first = children()
        assert processes.check(adapter).certificate.rank == 4
        assert children() == first
    finally:
        processes.close()
    assert not children()


@pytest.mark.parametrize(
    ("make", "bounds", "says"),
    [
        (with_slow_tokenizer, {"cpu_seconds": 2.0}, "more than 2 s of CPU time"),
        (with_large_tokenizer, {"memory_bytes": 200 << 20}, "ends with status -6"),
    ],
    ids=["time", "memory"],
)
def test_a_tokenizer_that_takes_too_much_is_refused(tmp_path, adapter, make, bounds, says):
    (base := tmp_path / "base").mkdir()
    processes = CheckProcesses(LIMITS._replace(model=str(with_tokenizer(base)), vocabulary=2), **bounds)
    greedy = make(tmp_path / "greedy")
    try:
        with pytest.raises(AdapterIncompatible, match=says) as refused:
            processes.check(greedy)
        assert refused.value.reason == "TooLarge"
        with_tokenizer(adapter, normalizers.Sequence([]))
        (warning,) = processes.check(adapter).certificate.warnings
        assert warning.startswith("tokenizer.json: normalizer is not that of the base model's tokenizer")
    finally:
        processes.close()


def test_a_check_that_gets_little_time_ends_before_anybody_takes_it_for_a_disk_that_hangs(tmp_path, adapter):
    (base := tmp_path / "base").mkdir()
    limits = LIMITS._replace(model=str(with_tokenizer(base)), vocabulary=2)
    slow = with_slow_tokenizer(tmp_path / "slow")
    size = (slow / "adapter_model.safetensors").stat().st_size
    processes = CheckProcesses(limits, seconds=1.0, bytes_per_second=size)
    try:
        began = time.monotonic()
        with pytest.raises(AdapterFetchFailed, match="did not end within 2 s: this machine has little time") as failed:
            processes.check(slow)
        assert time.monotonic() - began < 5
        assert failed.value.retry_after > 0
        assert not children()
    finally:
        processes.close()


def test_with_a_runners_own_settings_a_check_ends_before_its_disk_counts_as_hanging():
    """Else its thread went on, while others were told that the disk hangs, and its namespace began another one."""
    waits = Settings.model_fields["disk_stall_seconds"].default
    assert 1.5 * check_processes.CPU_SECONDS < CHECK_SHARE * waits < waits - 10


def test_a_process_that_was_killed_is_replaced(processes, adapter):
    processes.check(adapter)
    (child,) = children()
    os.kill(int(child.name), signal.SIGKILL)
    with suppress(AdapterFetchFailed):  # it was still ending
        processes.check(adapter)
    assert processes.check(adapter).certificate.rank == 4
    assert len(children()) == 1
    assert child not in children()


def test_threads_check_at_the_same_time_with_little_priority(processes, tmp_path):
    folders = [write_adapter(tmp_path / f"a{number}", seed=number) for number in range(8)]
    with ThreadPoolExecutor(4) as threads:
        checked = list(threads.map(processes.check, folders))
    assert [one.layout.file.parent for one in checked] == folders
    assert 1 <= len(children()) <= 4
    assert {os.getpriority(os.PRIO_PROCESS, int(child.name)) for child in children()} == {LOWEST_PRIORITY}


async def test_a_long_check_pauses_often(processes, adapter, tmp_path):
    """Mutation: what runs beside it waits for the next tick, each time that the check runs."""
    processes.check(adapter)
    (process,) = children()
    status = Path("/proc", fork_of(process), "status")
    with ThreadPoolExecutor(1) as thread:
        before = pauses(status)
        refused = thread.submit(processes.check, with_slow_pattern(tmp_path / "slow"))
        await until(lambda: refused.done() or pauses(status) > before + 50)
        assert not refused.done()
        with pytest.raises(AdapterIncompatible):
            refused.result()


def pauses(status: Path) -> int:
    """How often the process has left its processor on its own"""
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt"))


def test_short_checks_at_once_take_turns_in_one_process(processes, tmp_path, monkeypatch):
    """Mutation: each check that finds none idle starts one, which takes as long as tens of checks."""
    monkeypatch.setattr(check_processes, "START_SECONDS", 60.0)
    folders = [write_adapter(tmp_path / f"a{number}", seed=number) for number in range(8)]
    with ThreadPoolExecutor(4) as threads:
        checked = list(threads.map(processes.check, folders))
    assert [one.layout.file.parent for one in checked] == folders
    assert len(children()) == 1


def test_a_check_does_not_wait_long_for_another_one(tmp_path, adapter):
    """Mutation: it waits until a process is idle."""
    (base := tmp_path / "base").mkdir()
    processes = CheckProcesses(LIMITS._replace(model=str(with_tokenizer(base)), vocabulary=2))
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(processes.check, with_slow_tokenizer(tmp_path / "slow"))
        try:
            eventually(children, 1)
            processes.check(adapter)
            assert not slow.done()
            assert len(children()) == 2
        finally:
            processes.close()


def has_computed(folder: Path) -> bool:
    """For a hundredth of a second or more: it is in the check."""
    user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return int(user) + int(system) > 1


def ends_with_its_parent(folder: Path) -> bool:
    """It asks for that just before it limits itself."""
    return re.search("^Max file size +0 ", (folder / "limits").read_text(), re.MULTILINE) is not None


CHECKS = """
import sys
from pathlib import Path
import orjson
from motet_runner.adapters.certification import EngineLimits
from motet_runner.adapters.check_processes import CheckProcesses
CheckProcesses(EngineLimits.of(orjson.loads(sys.argv[1]))).check(Path(sys.argv[2]))
"""


def eventually(found: Callable[[], list[Path]], count: int) -> list[Path]:
    """A look reads all of /proc. On a busy machine looks without a pause would leave no time to what they look for: it
    has the lowest priority."""
    ended = time.monotonic() + 20
    while len(folders := found()) != count:
        assert time.monotonic() < ended
        time.sleep(0.1)
    return folders


def test_a_check_ends_with_its_service(tmp_path):
    """The service is killed in mid-check, so it ends nothing itself."""
    adapter = with_slow_pattern(tmp_path / "slow")
    with subprocess.Popen([sys.executable, "-c", CHECKS, LIMITS.encode(), adapter]) as service:
        (process,) = eventually(lambda: children(of=service.pid), 1)
        (fork,) = eventually(lambda: children(of=int(process.name)), 1)
        eventually(lambda: [fork] if has_computed(fork) else [], 1)
        os.kill(int(fork.name), signal.SIGSTOP)  # it would not end by itself
        service.kill()
    eventually(lambda: [one for one in (process, fork) if checks(one)], 0)


def test_what_is_closing_begins_no_check(processes, adapter, monkeypatch):
    """Mutation: a check takes an idle process just before it is ended, or starts one. Nothing would end it."""
    processes.check(adapter)
    end_idle = partial(vars(CheckProcesses)["_end_idle"], processes)

    def meanwhile(kept):
        for _ in range(2):
            with pytest.raises(AdapterFetchFailed, match="This runner is ending"):
                processes.check(adapter)
            end_idle(kept)

    monkeypatch.setattr(processes, "_end_idle", meanwhile)
    monkeypatch.setattr(processes, "_start", lambda: pytest.fail("it starts a process"))
    processes.close()
    assert not children()


def test_what_closes_ends_its_checks_and_begins_no_more(tmp_path, adapter):
    """Mutation: only idle processes end. A runner that ends then waits for its check: for ever, if a disk hangs."""
    processes, slow = CheckProcesses(LIMITS), with_slow_pattern(tmp_path / "slow")
    with ThreadPoolExecutor(1) as threads:
        checking = threads.submit(processes.check, slow)
        (process,) = eventually(children, 1)
        (fork,) = eventually(lambda: children(of=int(process.name)), 1)
        eventually(lambda: [fork] if ends_with_its_parent(fork) else [], 1)
        os.kill(int(fork.name), signal.SIGSTOP)  # it would not end by itself
        try:
            processes.close()
            with pytest.raises(AdapterFetchFailed, match="This runner is ending") as ended:
                checking.result(timeout=60)
        finally:
            with suppress(ProcessLookupError):
                os.kill(int(fork.name), signal.SIGKILL)
    assert ended.value.retry_after > 0
    eventually(lambda: [one for one in (process, fork) if checks(one)], 0)
    with pytest.raises(AdapterFetchFailed, match="This runner is ending"):
        processes.check(adapter)
    assert not children()


def meet(together: Barrier, ask: Callable[..., object], *given: object) -> object:
    together.wait()
    try:
        return ask(*given)
    finally:
        together.wait()


def check_at_once(processes: CheckProcesses, adapter: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check waits until all have their processes, and again until none has ended."""
    together = Barrier(count)

    with monkeypatch.context() as changed, ThreadPoolExecutor(count) as threads:
        changed.setattr(check_processes, "_ask", partial(meet, together, vars(check_processes)["_ask"]))
        for one in [threads.submit(processes.check, adapter) for _ in range(count)]:
            one.result()


def test_checks_at_once_leave_their_processes_to_the_next_ones(processes, adapter, monkeypatch):
    """Mutation: one process stays. Each of many checks at once then starts one, which takes longer than the check."""
    check_at_once(processes, adapter, 3, monkeypatch)
    before = {one.name for one in children()}
    assert len(before) == 3
    check_at_once(processes, adapter, 3, monkeypatch)
    assert {one.name for one in children()} == before


async def test_one_process_stays_when_fewer_checks_come(processes, adapter, monkeypatch):
    monkeypatch.setattr(check_processes, "SPARE_SECONDS", 0.01)
    check_at_once(processes, adapter, 3, monkeypatch)
    await until(lambda: len(children()) == 1)
    (left,) = children()
    processes.check(adapter)
    assert [one.name for one in children()] == [left.name]
