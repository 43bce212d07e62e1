"""What holds for every test."""

from hypothesis import settings

# How long an example takes depends on what else the machine does; tests are about what is true, benchmarks about time.
settings.register_profile("motet", deadline=None)
settings.load_profile("motet")

pytest_plugins = ["tests.support.postgresql"]
"""Fixtures that are not tied to a folder of tests."""
