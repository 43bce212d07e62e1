"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from motet.read_settings import read
from motet_cli.folders import folder_named
from motet_cli.settings import Settings
from motet_operator.local.state_directory import default_data_dir


def _data_dir() -> Path:
    return read(Settings).data_dir or default_data_dir()


def _usable(data_dir: Path) -> Path:
    folder_named(data_dir)
    return data_dir


DataDir = Annotated[
    Path,
    typer.Option(
        "--data-dir",
        help="The state directory. Each running stack needs its own.",
        default_factory=_data_dir,
        callback=_usable,
        show_default="MOTET_DATA_DIR, else $XDG_DATA_HOME/motet, else ~/.local/share/motet",
    ),
]
