"""`motet up` in this process, as far as what it starts."""

import asyncio
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest

from motet_cli import up as module
from motet_cli.readiness import StartupReady
from motet_cli.up import GOES_ON, INTERRUPTED, Options, up
from motet_operator.local.parent import Parent


def test_up_does_not_pass_the_users_key_to_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    async def in_front(*_: Any, **__: Any) -> int:
        seen.append(dict(os.environ))
        return 0

    monkeypatch.setattr(module, "_run_in_foreground", in_front)
    monkeypatch.setattr(module, "log_to", lambda _: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ["MOTET_API_KEY"] = "motet_0123456789abcdef_of-a-person"
    options = Options(data_dir=tmp_path, manifests=None, port=0, runners=None, detach=False, wait_seconds=1)
    assert up(options) == 0
    (inherited,) = seen
    assert inherited["MOTET_DATA_DIR"] == str(tmp_path)
    assert "MOTET_API_KEY" not in inherited


class Said:
    """In place of the output."""

    lines: ClassVar[list[str]] = []

    def __init__(self, *_: object) -> None:
        self.lines.clear()

    def say(self, text: str) -> None:
        self.lines.append(text)

    def ready(self, _: StartupReady, *, hint: str) -> None:
        self.lines.append(hint)

    async def follow(self) -> None: ...

    def close(self) -> None: ...


class ParentOfNone(Parent):
    """Without any process."""

    latest: ClassVar["ParentOfNone"]

    async def run(self) -> None:
        type(self).latest = self
        await self.stop.wait()
        await asyncio.sleep(0.01)  # it takes some turns until it has left its processes

    def interrupt(self) -> None:
        self._interrupted()


def test_who_is_interrupted_as_the_stack_gets_ready_is_told_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ready_and_interrupted(*_: object) -> StartupReady:
        ParentOfNone.latest.interrupt()
        return StartupReady(status={})

    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name, other in {
        "log_to": lambda _: None,
        "what_runs": lambda _: ["gateway"],
        "read_records": lambda _: {"gateway": None},
        "Parent": ParentOfNone,
        "UpOutput": Said,
        "_watch": ready_and_interrupted,
    }.items():
        monkeypatch.setattr(module, name, other)
    options = Options(data_dir=tmp_path, manifests=None, port=0, runners=None, detach=False, wait_seconds=1)
    assert up(options) == INTERRUPTED
    assert [line.startswith(GOES_ON) for line in Said.lines] == [True]
