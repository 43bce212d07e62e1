"""Where the database of a state directory is."""

import os
from pathlib import Path

from motet.read_settings import read
from motet.settings import Database, ProcessSettings
from motet.store.database import parse
from motet_cli.log_file import log_to
from motet_operator.local.state_directory import StateDirectory


def database_url(data_dir: Path) -> str:
    """The URL of the database. Also sets the umask, so that only this user can read files that this process makes."""
    layout = StateDirectory.of(data_dir)
    log_to(layout.log("up"))
    os.umask(0o077)
    return read(Database).url(read(ProcessSettings).model_copy(update={"data_dir": layout.data}))


def is_missing(url: str) -> bool:
    """Whether the file of an SQLite database does not exist. Opening it would make it."""
    parsed = parse(url)
    return parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").is_file()
