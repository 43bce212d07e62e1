"""What a test needs of the machine it runs on: the only place where tests are skipped.

Where the whole suite is meant to run a skipped test must not look like a green one: with `CI` set, what is lacking
fails.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from tools.kube.binaries import uses_existing_cluster

NOT_OURS = "says something of a control plane of our own, and USE_EXISTING_CLUSTER is set"


def lacking(what: str) -> NoReturn:
    """This machine could be set up for the test, and is not."""
    if os.environ.get("CI"):
        pytest.fail(f"This machine lacks what the test needs: {what}", pytrace=False)
    pytest.skip(what)


def out_of_reach(why: str) -> NoReturn:
    """No setup of this machine lets the test run: it is skipped everywhere. `tests/repo/test_skips.py` knows each."""
    pytest.skip(why)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(found, what): lacking, when found() gives nothing")
    config.addinivalue_line("markers", "own_cluster: not on a cluster that belongs to somebody else")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("own_cluster") and uses_existing_cluster():
        out_of_reach(NOT_OURS)
    for mark in item.iter_markers("needs"):
        found, what = mark.args
        if not found():
            lacking(what)


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Even as root: this thread, and those that it starts meanwhile, may write only where the file's mode lets them."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, of the calling thread
    before = (ctypes.c_uint32 * 6)()  # twice effective, permitted, inheritable
    assert libc.capget(header, before) == 0, os.strerror(ctypes.get_errno())
    after = type(before)(*before)
    after[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH are not in effect
    assert libc.capset(header, after) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0, os.strerror(ctypes.get_errno())
