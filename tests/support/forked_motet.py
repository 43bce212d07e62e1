"""The command `motet` in a process of its own that a server has forked, with what it imports: to start it takes a tenth
of the CPU time. Tests of the stack, and `in_an_interpreter_of_its_own`, start it as users do.
"""

import atexit
import os
import subprocess
from collections.abc import Callable
from tempfile import TemporaryFile

from testbed.fork_server import ForkServer
from testbed.local_stack import MOTET

COMMAND = MOTET[-1]
SERVER = ForkServer([COMMAND, *(f"motet_cli.{one}" for one in ("up", "chat", "why", "status", "key_commands"))])
atexit.register(SERVER.close)
SECONDS = 60.0

Start = Callable[[tuple[str, ...], dict[str, str], str], "subprocess.CompletedProcess[str]"]


def in_an_interpreter_of_its_own(
    arguments: tuple[str, ...], env: dict[str, str], typed: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*MOTET, *arguments], env=env, capture_output=True, text=True, timeout=SECONDS, check=False, input=typed
    )


def forked(arguments: tuple[str, ...], env: dict[str, str], typed: str) -> "subprocess.CompletedProcess[str]":
    if not SERVER.can_start(MOTET, env, None):
        return in_an_interpreter_of_its_own(arguments, env, typed)
    with TemporaryFile("w+") as stdin, TemporaryFile("w+") as stdout, TemporaryFile("w+") as stderr:
        stdin.write(typed)
        stdin.seek(0)
        process = SERVER.start(
            *(COMMAND, *arguments), env=env, stdin=stdin.fileno(), output=stdout.fileno(), errors=stderr.fileno()
        )
        try:
            code = process.wait(SECONDS)
        finally:
            process.kill()
        for one in (stdout, stderr):
            one.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())


def motet(
    *arguments: str, env: dict[str, str] | None = None, typed: str = "", start: Start = forked
) -> "subprocess.CompletedProcess[str]":
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MOTET_")}
    done = start(arguments, outside | (env or {}), typed)
    assert "Traceback" not in done.stderr
    return done
