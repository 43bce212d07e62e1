"""What holds for every test."""

import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.support.logs import use_plain_logs
from tools.kube.binaries import cache

# How long an example takes depends on what else the machine does; tests are about what is true, benchmarks about time.
# Hypothesis' own profile for CI repeats the same examples in each run: ours looks for others there, too, and begins
# with those that have failed. They lie beside the Kubernetes tools, since a checkout of CI lives for one run.
settings.register_profile(
    "motet",
    settings.get_profile("default"),
    max_examples=50,  # of a hundred: other ones in each run
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    database=DirectoryBasedExampleDatabase(cache().parent / "hypothesis"),
)
settings.load_profile("motet")

use_plain_logs()

# Until all tests are collected: collections of garbage took two fifths of the time of all imports.
gc.disable()

# Torch's threads wait for the next operator on a busy core, which is two fifths of what the tests of engines take.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# For the control plane and the many calls of kubectl and helm, which spend up to a fifth of their time on garbage.
os.environ.setdefault("GOGC", "400")

pytest_plugins = ["testbed.machine", "tests.support.postgresql"]
"""Fixtures and marks that are not tied to a folder of tests."""

MOST_OF_A_LEFT_THREAD = 20.0
"""Seconds of CPU time"""


@pytest.fixture(autouse=True)
def plain_logs_again() -> Iterator[None]:
    """A command that a test calls may configure others. Tests after it would look for lines in vain."""
    yield
    use_plain_logs()


def pytest_collection_finish() -> None:
    leave_out_what_stays()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Each module imports more, such as torch: a full collection then took up to a second, also in tests that count
    what is freed and make a hundred of them."""
    try:
        yield
    finally:
        if nextitem is not None and nextitem.path != item.path:
            leave_out_what_stays()


def leave_out_what_stays() -> None:
    """Collections of garbage do not visit what stays for the whole run: modules, tests and their results."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A thread that a test has left behind, and that does not rest, makes all tests after it slower."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.ident is not None:
            used = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            if used > MOST_OF_A_LEFT_THREAD:
                reporter = session.config.pluginmanager.get_plugin("terminalreporter")
                reporter.ensure_newline()
                reporter.write_line(
                    f"FAILED a test has left the thread {thread.name}, which has used {used:.0f} s of CPU time"
                )
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
