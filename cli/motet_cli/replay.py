"""`motet replay`: what was recorded live is decided again."""

from collections.abc import Sequence
from pathlib import Path

from motet_cli.printer import Printer
from motet_simulator.replay import replay as replay_one

DIFFERS = 1
"""Exit status: a decision is another one now."""


def replay(records: Sequence[Path]) -> int:
    printer = Printer(width_of_a_pipe=200)
    status = 0
    for file in records:
        found = replay_one(file)
        if found.difference:
            status = DIFFERS
        printer.line(f"{file}: {found.events} events, {found.difference or 'all decisions are the same'}.")
    return status
