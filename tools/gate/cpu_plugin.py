"""A plugin of pytest that writes the CPU seconds of each test into the JUnit report.

Processes that a test started count once they were waited for: those of a module's fixture for its last test, and those
of the whole lane, such as a control plane, for the lane's last test.
"""

import os
from collections.abc import Iterator

import pytest

from tools.gate.summary import CPU


class CpuOfTests:
    def __init__(self) -> None:
        self._counted = 0.0

    def pytest_collection_finish(self) -> None:
        self._counted = _used()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            yield
        finally:
            used = _used()
            item.user_properties.append((CPU, round(used - self._counted, 2)))
            self._counted = used


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuOfTests())


def _used() -> float:
    """By this process and by all that it has waited for."""
    return sum(os.times()[:4])
