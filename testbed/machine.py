"""Checks what a test needs of its machine. Only this module skips tests.

With `CI` set, a test fails when something is missing: where the whole suite should run, a skipped test must not look
green.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NoReturn

import pytest

from tools.kube.binaries import uses_existing_cluster

NO_GPU = "needs a CUDA device"
NOT_OURS = "says something of a control plane of our own, and USE_EXISTING_CLUSTER is set"


def lacking(what: str) -> NoReturn:
    """Skip a test, or fail it with `CI` set: this machine is not set up for it, but could be."""
    if os.environ.get("CI"):
        pytest.fail(f"This machine lacks what the test needs: {what}", pytrace=False)
    pytest.skip(what)


def out_of_reach(why: str) -> NoReturn:
    """Skip a test that no setup of this machine lets run. `tests/repo/test_skips.py` lists each such test."""
    pytest.skip(why)


@cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(found, what): lacking, when found() gives nothing")
    config.addinivalue_line("markers", "own_cluster: not on a cluster that belongs to somebody else")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("own_cluster") and uses_existing_cluster():
        out_of_reach(NOT_OURS)
    if item.get_closest_marker("gpu") and not has_gpu():
        out_of_reach(NO_GPU)
    for mark in item.iter_markers("needs"):
        found, what = mark.args
        if not found():
            lacking(what)


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """File modes bind this thread and those that it starts meanwhile, also if they are root."""
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
