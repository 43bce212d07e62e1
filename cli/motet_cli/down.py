"""`motet down`: stops all processes of a stack."""

import asyncio
from pathlib import Path

import typer

from motet_cli.log_file import log_to
from motet_operator.local.state_directory import StateDirectory
from motet_operator.local.teardown import take_down


def down(data_dir: Path) -> int:
    layout = StateDirectory.of(data_dir)
    log_to(layout.log("up"))
    stopped = asyncio.run(take_down(layout))
    if stopped:
        typer.echo(f"stopped {', '.join(stopped)}")
    else:
        typer.echo(f"Motet is not running (state directory {layout.data}).")
    return 0
