"""Pages as programs: their blocks, run in order, and what they print compared with what is shown.

A block marked `sh` is commands for one shell; each must succeed. A block marked `console` is commands after `$ `
(continued after `> `), with the lines that they print. Blocks marked `python` share one namespace; the block marked
`text` right after one is all that it prints, and without one it prints nothing. A `python` or `yaml` block whose first
line is a comment with the name of a file is a file that the reader saves.

In what is printed `…` stands for anything, a line that is only `…` for any number of lines, and the width of columns
does not count. A comment before a block says what is not in it:

    <!-- not run: why it cannot run here -->
    <!-- fails -->     its last command is refused, and the page shows how
"""

import os
import re
import selectors
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ANYTHING = "…"

_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*?) -->\n\n?)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)

_FILE = re.compile(r"# (?P<name>[\w./-]+\.(?:py|yaml))\n")


@dataclass(frozen=True, slots=True)
class Step:
    command: str
    shown: str | None = None
    """What the page says that it prints; None where the page says nothing."""


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    kind: str
    text: str
    note: str = ""
    """What a comment before it says."""

    @property
    def runs(self) -> bool:
        return self.kind in ("sh", "console") and not self.reason_not_to_run

    @property
    def file(self) -> str:
        """What the reader saves it as; empty: it is no file."""
        found = _FILE.match(self.text) if self.kind in ("python", "yaml") else None
        return found["name"] if found else ""

    @property
    def is_python(self) -> bool:
        """To be executed where the page is read, not saved for later."""
        return self.kind == "python" and not self.file

    @property
    def reason_not_to_run(self) -> str:
        return self.note.removeprefix("not run: ") if self.note.startswith("not run: ") else ""

    @property
    def fails(self) -> bool:
        return self.note == "fails"

    @property
    def steps(self) -> list[Step]:
        return [Step(self.text)] if self.kind == "sh" else list(_steps(self.text))

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start("kind")) + 1,
            kind=found["kind"],
            text=found["text"],
            note=found["note"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


def _steps(text: str) -> Iterator[Step]:
    command: list[str] = []
    shown: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command:
                yield Step("\n".join(command), "\n".join(shown))
            command, shown = [line[2:]], []
        elif line.startswith("> ") and command and not shown:
            command.append(line[2:])
        else:
            shown.append(line)
    if not command:
        raise ValueError(f"a console block begins with a command after '$ ': {text[:80]!r}")
    yield Step("\n".join(command), "\n".join(shown))


def matches(shown: str, printed: str) -> bool:
    """Whether a program printed what the page shows."""
    pattern = ""
    for line in _squeezed(shown):
        if line == ANYTHING:
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(map(re.escape, line.split(ANYTHING))) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _squeezed(printed))) is not None


def _squeezed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip("\n").splitlines()]


class NotAsShown(AssertionError):
    """A command does not do what its page says."""


class Python:
    """One namespace, which remembers what earlier blocks have set."""

    def __init__(self) -> None:
        self._namespace: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block, *, shown: str) -> None:
        """Raises NotAsShown, and what the block raises, with the line of the page."""
        code = compile("\n" * block.line + block.text, str(block.page), "exec", dont_inherit=True)
        with redirect_stdout(StringIO()) as printed:
            exec(code, self._namespace)
        if not matches(shown, printed.getvalue()):
            raise NotAsShown(f"{block}:\n--- shows\n{shown}\n--- printed\n{printed.getvalue()}")


class Shell:
    """One bash, which remembers what earlier blocks have set, and ends with all that they started."""

    def __init__(self, folder: Path, *, scratch: Path, env: Mapping[str, str], timeout_s: float = 240) -> None:
        """`folder` is where the reader is; `scratch` is ours."""
        self._folder, self._scratch, self._env, self._timeout_s = folder, scratch, env, timeout_s
        self._count = 0

    def __enter__(self) -> Self:
        self._statuses, writable = os.pipe()
        os.set_blocking(self._statuses, False)
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=self._folder,
            env=dict(self._env),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            pass_fds=(writable,),
            start_new_session=True,
        )
        os.close(writable)
        self._report = writable  # as bash and what it starts know it
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        os.close(self._statuses)

    def save(self, block: Block) -> None:
        """Where the reader is at first, whatever folder the shell has gone to."""
        path = self._folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)

    def run(self, block: Block) -> None:
        """Raises NotAsShown, with the command and all that it printed."""
        steps = block.steps
        for step in steps:
            status, printed = self._run(step.command)
            refused = block.fails and step is steps[-1]
            if status is None:
                raise NotAsShown(f"{block}: not within {self._timeout_s:g} s:\n{step.command}\n{printed}")
            if (status != 0) is not refused:
                said = "is refused on the page, and succeeds" if refused else f"ends with {status}"
                raise NotAsShown(f"{block}: {said}:\n{step.command}\n{printed}")
            if step.shown is not None and not matches(step.shown, printed):
                # A summary of many tests has only the first line.
                first = f"{block}: {step.command.splitlines()[0]}: printed {printed[-300:]!r}"
                raise NotAsShown(
                    f"{first}\n--- command\n{step.command}\n--- shows\n{step.shown}\n--- printed\n{printed}"
                )

    def _run(self, command: str) -> tuple[int | None, str]:
        """Exit status (None: it takes too long) and output. The first command that fails ends the script."""
        self._count += 1
        script, output = (self._scratch / f"{self._count}.{suffix}" for suffix in ("sh", "out"))
        script.write_text(f"trap 'status=$?; trap - ERR; return $status' ERR\n{command}\ntrap - ERR\n")
        output.touch()
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"source {script} >{output} 2>&1 </dev/null; echo $? >&{self._report}\n")
        self._bash.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._statuses, selectors.EVENT_READ)
            answered = selector.select(self._timeout_s)
        status = os.read(self._statuses, 64) if answered else b""
        return int(status) if status else None, output.read_text(errors="replace")


def type_page(page: Iterable[Block], shell: Shell, python: Python | None = None) -> None:
    """Do all that a reader does with it. Raises NotAsShown where the page promises something else.

    Without `python`, a page that has a block for it is a mistake.
    """
    found = list(page)
    assert found, "a page without blocks"
    for block, after in zip_longest(found, found[1:]):
        if block.file:
            shell.save(block)
        elif block.runs:
            shell.run(block)
        elif block.is_python:
            assert python is not None, f"{block}: no Python here"
            python.run(block, shown=after.text if after is not None and after.kind == "text" else "")
