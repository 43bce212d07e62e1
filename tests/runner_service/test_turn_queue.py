"""Calls and other things that wait: owners take turns."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from motet.api.v1 import common_pb2, scheduler_pb2
from motet_runner.adapters import fetches
from motet_runner.daemon_threads import DaemonThreads
from motet_runner.sources.volume_threads import THREADS_PER_VOLUME
from motet_runner.turn_queue import TurnQueue
from tests.common.waiting import until
from tests.runner_service.test_registry import RegistrySetup
from tests.support.in_process_runner import write_adapter


def taken(queue: TurnQueue[Any]) -> list[Any]:
    return [queue.take() for _ in range(len(queue))]


def test_owners_take_turns_and_within_one_the_oldest_is_first() -> None:
    queue = TurnQueue[str]()
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.add(item, item[0])
    assert taken(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert not queue


def test_who_comes_later_has_the_next_turn_but_one_of_each_other() -> None:
    queue = TurnQueue[str]()
    for number in range(4):
        queue.add(f"a{number}", "a")
    assert queue.take() == "a0"
    queue.add("b", "b")
    assert taken(queue) == ["a1", "b", "a2", "a3"]


def test_urgent_things_come_first_and_take_turns_themselves() -> None:
    queue = TurnQueue[str]()
    queue.add("later", "a")
    for item in ("a1", "a2", "b1"):
        queue.add(item, item[0], urgent=True)
    assert taken(queue) == ["a1", "b1", "a2", "later"]


def test_what_is_not_wanted_any_more_is_forgotten() -> None:
    queue = TurnQueue[str]()
    for item in ("a1", "b1", "a2"):
        queue.add(item, item[0])
    queue.add("b0", "b", urgent=True)
    queue.keep(lambda item: not item.startswith("b"))
    assert taken(queue) == ["a1", "a2"]


def test_a_call_of_another_owner_is_next_however_many_wait() -> None:
    threads, go, done = DaemonThreads("test", 1), threading.Event(), []
    threads.submit(go.wait)
    calls = [threads.submit(lambda n=number: done.append(n), owner="many") for number in range(9)]
    calls.append(threads.submit(lambda: done.append("few"), owner="few"))
    calls.append(threads.submit(lambda: done.append("urgent"), owner="many", urgent=True))
    calls[1].cancel()
    go.set()
    for call in calls:
        if not call.cancelled():
            call.result(10)
    assert done == ["urgent", 0, "few", *range(2, 9)]


async def test_one_namespaces_folders_on_a_volume_keep_no_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = RegistrySetup(tmp_path, capacity=99)
    go, begun, copy_folder = threading.Semaphore(0), list[str](), fetches.copy_folder

    def once_told(cache: Any, folder: Any, request: Any, *more: Any, **how: Any) -> Any:
        begun.append(request.namespace)
        go.acquire(timeout=10)
        return copy_folder(cache, folder, request, *more, **how)

    monkeypatch.setattr(fetches, "copy_folder", once_told)
    orders = []
    for number in range(9):
        namespace = "few" if number == 8 else "many"
        ref = common_pb2.AdapterRef(namespace=namespace, name=f"a{number}")
        source = write_adapter(tmp_path / f"a{number}", seed=number)
        stage = common_pb2.ADAPTER_STAGE_CERTIFIED
        order = scheduler_pb2.EnsureAdapter(adapter=ref, source=source.as_uri(), stage=stage)
        orders.append(asyncio.create_task(setup.adapters.ensure(order)))
    volumes = setup.adapters.files.volumes
    await until(lambda: volumes.by_name, every=0.001)
    (volume,) = volumes.by_name.values()
    await until(lambda: len(volume.threads.calls) == len(orders) - THREADS_PER_VOLUME, every=0.001)
    await until(lambda: len(begun) == THREADS_PER_VOLUME, every=0.001)
    # One at a time: of two threads at once, the first to take a call may be the second to begin it.
    for expected in range(THREADS_PER_VOLUME + 1, 2 * THREADS_PER_VOLUME + 1):
        go.release()
        while len(begun) < expected:
            await asyncio.sleep(0.001)
    assert "few" in begun, begun
    go.release(len(orders))
    await asyncio.gather(*orders)
    setup.adapters.close()
