"""How the tests' own process logs."""

import structlog


def use_plain_logs() -> None:
    """Configure the logs as `configure_logging` does: the library's default takes seconds for one traceback, and blocks
    the event loop meanwhile."""
    structlog.reset_defaults()
    structlog.configure(
        processors=[
            *structlog.get_config()["processors"][:-1],
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ]
    )
