"""Processes that a benchmark starts, and stops while it measures another one, with all their children.

Engines that wait spin. They would take the cores from the one that is measured."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

LAST_LINES = 15
"""Of what the process said on stderr, in the error when it ends by itself."""


class DrivenError(Exception):
    """The process ended, or answered with an error."""


class Stoppable:
    """A process in a group of its own. It ends with the block."""

    def __init__(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        # What it leaves there when it is killed goes with it.
        self._scratch = tempfile.TemporaryDirectory()
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": self._scratch.name, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=self._where_answers_go(),
            stderr=self._said,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()
        self._said.close()
        self._scratch.cleanup()

    @property
    def processes(self) -> list[psutil.Process]:
        """It, and its children: none if it has ended."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def last_said(self) -> str:
        self._said.seek(0)
        return "".join(self._said.readlines()[-LAST_LINES:])

    def _where_answers_go(self) -> int | IO[str]:
        return self._said

    def _signal(self, which: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, which)


class Driven(Stoppable):
    """Such a process that answers questions. It is stopped between two of them."""

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Its answer. The process runs only meanwhile."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.resume()
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        self.stop()
        if not line:
            raise DrivenError(f"{self.name} ended.\n{self.last_said()}")
        answer = json.loads(line)
        if "error" in answer:
            raise DrivenError(f"{self.name}: {answer['error']}\n{self.last_said()}")
        return answer

    def _where_answers_go(self) -> int:
        return subprocess.PIPE
