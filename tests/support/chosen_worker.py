"""The worker that tests of engines compute with. Also for a process that a test starts: it has none of the test's
patches."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from motet.clock import Clock
from motet_runner.memory.copy_stream import CopyStream
from motet_runner.memory.host_pages import HostPagesAside
from motet_runner.memory.paged import PagedStore
from tests.support.fixed_batches import fixed_batches

NAMES = ("local", "device", "recorded")
WORKER = os.environ.get("MOTET_RUNNER_WORKER", "local")
"""All tests of engines also hold with `device`: the worker of a GPU, whose swapped pages pass through pieces of its
memory, with a CPU in its place; and with `recorded`: it has recorded decodes, too, if the kernels are the compiled
ones."""


@contextmanager
def chosen_worker(name: str = WORKER) -> Iterator[None]:
    assert name in NAMES, name
    with ExitStack() as stack:
        if name != "local":
            stack.enter_context(patch("motet_runner.engine.computes_by_itself", lambda _: True))
            stack.enter_context(patch("motet_runner.memory.tiers.HostPages", _aside))
        if name == "recorded":
            stack.enter_context(fixed_batches())
        yield


def _aside(device: PagedStore, count: int, *, clock: Clock) -> HostPagesAside:
    return HostPagesAside(device, count, CopyStream())
