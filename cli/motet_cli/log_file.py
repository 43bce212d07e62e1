"""What the command line's own machinery has to say goes to a file: people read sentences on the terminal instead."""

import os
from pathlib import Path

import structlog


def log_to(path: Path) -> None:
    """Send structured logging of this process to a file; nowhere if it cannot be opened."""
    try:
        file = path.open("a", encoding="utf-8")  # open for as long as this process lives
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
