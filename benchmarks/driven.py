"""A process that runs requests for a benchmark: it reads one JSON object in a line, and answers with one.

Between two questions the process is stopped, with all its children. Engines that wait spin, and would take the cores
from the one that is measured.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

LAST_LINES = 15
"""Of what the process said on stderr, in the error when it ends by itself."""


class DrivenError(Exception):
    """The process ended, or answered with an error."""


class Driven(AbstractContextManager["Driven"]):
    def __init__(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            command,
            env=os.environ | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._signal(signal.SIGKILL)
        self._process.communicate()
        self._said.close()

    @property
    def processes(self) -> list[psutil.Process]:
        """It, and its children: none if it has ended."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

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
            raise DrivenError(f"{self.name} ended.\n{self._last_said()}")
        answer = json.loads(line)
        if "error" in answer:
            raise DrivenError(f"{self.name}: {answer['error']}\n{self._last_said()}")
        return answer

    def _last_said(self) -> str:
        self._said.seek(0)
        return "".join(self._said.readlines()[-LAST_LINES:])

    def _signal(self, which: signal.Signals) -> None:
        # It leads a group, and has not been waited for, so the number is no other group's.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, which)
