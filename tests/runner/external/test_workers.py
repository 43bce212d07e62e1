"""Several workers of vLLM on one machine."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from os import getpid
from pathlib import Path

import pytest

from motet.errors import ModelFolderError
from motet.settings import ProcessSettings
from motet_runner.engine_client import EngineClient, EngineDied
from motet_runner.engine_messages import Start
from motet_runner.external.vllm.workers import bind_cores, bound_cores, shared_by, threads_of_each
from motet_runner.interface import EngineConfig
from motet_runner.pipe import pack


def test_each_worker_on_a_cpu_has_as_many_threads() -> None:
    assert threads_of_each(4, 4, None, 1) == 4
    assert threads_of_each(4, 4, None, 2) == 2
    assert threads_of_each(4, 4, 2, 2) == 1
    assert threads_of_each(3, 3, None, 2) == 1
    assert threads_of_each(2, 2, 8, 1) == 2
    assert threads_of_each(2, 2, 8, 2) == 1


def test_each_worker_has_a_thread_whatever_a_quota_leaves() -> None:
    assert threads_of_each(1, 8, None, 2) == 1
    assert threads_of_each(5, 8, None, 2) == 2
    assert threads_of_each(5, 8, 2, 2) == 1


def test_too_few_cores_are_named() -> None:
    with pytest.raises(ModelFolderError, match=r"engine\.parallel has 3 workers, and this runner has 2 cores"):
        threads_of_each(2, 2, None, 3)
    with pytest.raises(ModelFolderError, match="has 1 cores"):
        threads_of_each(2, 2, 1, 2)


def test_two_runners_of_a_machine_never_bind_the_same_core() -> None:
    """The numbers are those of no core, and each call is for another runner."""
    cores = range(70_000, 70_007)
    assert bound_cores(cores, 2, 2) == "70000,70001|70002,70003"
    assert bound_cores(cores, 2, 2) == "nobind", "three are left"
    assert bound_cores(cores, 1, 2) == "70004|70005"
    assert bound_cores(cores, 1, 2) == "nobind"
    assert bound_cores([], 1, 1) == "nobind"


def test_a_runner_whose_pool_names_its_cores_claims_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1|2-3")
    bind_cores([72_000, 72_001], 1, 2)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2-3"
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    bind_cores([72_000, 72_001], 1, 2)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "72000|72001"


BOUND = """
import sys
from motet_runner.external.vllm.workers import bound_cores
print(bound_cores([71_000, 71_001], 1, 2), flush=True)
sys.stdin.read()
"""


def test_the_cores_of_a_runner_that_was_killed_are_free_again() -> None:
    with subprocess.Popen([sys.executable, "-c", BOUND], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"71000|71001\n"
        assert bound_cores([71_000, 71_001], 1, 2) == "nobind"
        other.kill()
    assert bound_cores([71_000, 71_001], 1, 2) == "71000|71001"


WATCHED = """
import multiprocessing, os, sys, time
from motet_runner.external.vllm.workers import Watch

def work(started):
    import motet_runner.external.vllm.worker_extension
    started.set()
    time.sleep(600)

mode, watched = sys.argv[1], int(sys.argv[2])
context = multiprocessing.get_context("fork")
started = context.Event()
worker = context.Process(target=work, args=(started,))
worker.start()
assert started.wait(60)
if mode == "no list":
    multiprocessing.active_children = None
watch = Watch(watched)
if mode == "full":
    full = os.open("/dev/full", os.O_WRONLY)
if mode != "no list":
    watch.loaded()
print(worker.pid, flush=True)
if mode == "full":
    os.dup2(full, 1)
    os.dup2(full, 2)
time.sleep(600)
"""
NOTICED_SECONDS = 1.0
"""On a machine that computes nothing else"""
PATIENCE = 60


@contextmanager
def watched(mode: str, workers: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WATCHED, mode, str(workers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            yield engine
        finally:
            engine.kill()


def test_a_worker_that_ends_ends_the_engine() -> None:
    with watched("", 1) as engine:
        worker = int(engine.stdout.readline())
        with pytest.raises(subprocess.TimeoutExpired):
            engine.wait(NOTICED_SECONDS)
        os.kill(worker, signal.SIGKILL)
        killed = time.monotonic()
        assert engine.wait(PATIENCE) == 1
        others = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        assert time.monotonic() - killed <= NOTICED_SECONDS * others


def test_a_worker_that_has_ended_before_all_have_loaded_ends_the_engine() -> None:
    with watched("", 2) as engine:
        assert engine.wait(PATIENCE) == 1
        assert "worker_ended" in engine.stdout.read()


def test_a_worker_that_ends_ends_the_engine_if_its_log_cannot_be_written() -> None:
    with watched("full", 1) as engine:
        worker = int(engine.stdout.readline())
        time.sleep(NOTICED_SECONDS)
        os.kill(worker, signal.SIGKILL)
        assert engine.wait(PATIENCE) == 1


def test_a_watch_that_fails_ends_the_engine() -> None:
    """Else nobody would see a worker end."""
    with watched("no list", 1) as engine:
        assert engine.wait(PATIENCE) == 1
        assert "workers_not_watched" in engine.stdout.read()


IDLE = """
import multiprocessing, os, threading, time
from motet_runner import engine_process
from motet_runner.external.vllm import workers

class Idle:
    command_wait_seconds = turn = lambda self: None
    def __init__(self, *_, **__): ...
    def apply(self, commands): ...

class Loaded:
    mask_of = None
    class info:
        device = "other"

def load(config, on_progress):
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    worker.start()
    watch = workers.Watch(1)
    log = workers.log.error
    workers.log.error = lambda *said, **more: (time.sleep(0.5), log(*said, **more))
    watch.loaded()
    threading.Timer(2.0, worker.kill).start()  # the engine waits for commands then
    return Loaded()

engine_process.EngineLoop = Idle
engine_process.main(load)
"""


def test_an_engine_without_work_says_that_a_worker_has_ended(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", IDLE, str(theirs.fileno())]
        with subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as engine:
            try:
                ours.sendall(pack(Start(EngineConfig(model=tmp_path), os.getpid(), ProcessSettings(data_dir=tmp_path))))
                assert engine.wait(PATIENCE) == 1
                assert "worker_ended" in engine.stdout.read()
            finally:
                engine.kill()


SLOW_TO_END = """
import multiprocessing, os, time
from motet_runner.engine_process import main
from motet_runner.external.vllm.workers import Watch

def load(config, on_progress):
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    worker.start()
    Watch(1).loaded()
    os._exit = lambda status: time.sleep(600)
    on_progress(worker.pid, 0)
    time.sleep(600)

main(load)
"""


async def test_the_service_waits_for_no_threads_of_an_engine_that_ends(tmp_path: Path) -> None:
    """With a GPU, or beside processes that compute, they take seconds."""
    process = ProcessSettings(data_dir=tmp_path)
    client = EngineClient(EngineConfig(model=tmp_path), process, [sys.executable, "-c", SLOW_TO_END])
    await client.start()
    try:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(EngineDied, match="it closed its connection"):
                await client.loaded(lambda worker, _: os.kill(worker, signal.SIGKILL))
    finally:
        await client.stop()


def test_what_a_process_shares_is_found() -> None:
    ours = shared_memory.SharedMemory(create=True, size=64)
    try:
        assert ours.name in shared_by([getpid()])
    finally:
        ours.close()
        ours.unlink()
    assert ours.name not in shared_by([getpid()])
