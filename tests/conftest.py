"""What holds for every test."""

import structlog
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tools.kube.locate import cache

# How long an example takes depends on what else the machine does; tests are about what is true, benchmarks about time.
# Hypothesis' own profile for CI repeats the same examples in each run: ours looks for others there, too, and begins
# with those that have failed. They lie beside the Kubernetes tools, since a checkout of CI lives for one run.
settings.register_profile(
    "motet",
    settings.get_profile("default"),
    deadline=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    database=DirectoryBasedExampleDatabase(cache().parent / "hypothesis"),
)
settings.load_profile("motet")

# As `configure_logging` does: the library's own choice takes seconds for one traceback, on the event loop.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

pytest_plugins = ["tests.support.machine", "tests.support.postgresql"]
"""Fixtures and marks that are not tied to a folder of tests."""
