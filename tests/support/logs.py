"""What the tests' own process logs."""

import structlog


def use_plain_logs() -> None:
    """Whatever was configured before. As `configure_logging` does: the library's own choice takes seconds for one
    traceback, on the event loop."""
    structlog.reset_defaults()
    structlog.configure(
        processors=[
            *structlog.get_config()["processors"][:-1],
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ]
    )
