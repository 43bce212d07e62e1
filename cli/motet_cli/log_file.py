"""Sends log lines of the command line to a file. On the terminal people read sentences instead."""

import os
from pathlib import Path

import structlog


def log_to(path: Path) -> None:
    """Write the log lines of this process to a file. If the file cannot be opened, they are dropped."""
    try:
        file = path.open("a", encoding="utf-8")  # never closed: the log needs it until this process ends
    except OSError:
        file = Path(os.devnull).open("a", encoding="utf-8")  # noqa: SIM115
    structlog.configure(
        processors=[
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file),
        cache_logger_on_first_use=False,
    )
