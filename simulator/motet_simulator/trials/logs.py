"""What the services log in a trial. An error in a log is a defect, and nothing else is read."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import structlog

from motet_simulator.trials.plan import FaultKind, Plan

EXPECTED: dict[str, FaultKind | None] = {"request_kills_engines": None, "lease_step_failed": "leases garbled"}
"""Errors that a fault may cause; None: several may."""


@contextmanager
def errors_go_to(object_to: Callable[[str], None], plan: Plan) -> Iterator[None]:
    """`object_to` gets each error that is logged, unless the plan has a fault that may cause it."""
    kinds = {None, *(fault.kind for fault in plan.faults)}
    expected = {event for event, cause in EXPECTED.items() if cause in kinds}

    def take(_logger: object, _method: str, event: Any) -> NoReturn:
        if event["event"] not in expected:
            object_to("logged: " + " ".join(f"{name}={value!r}" for name, value in event.items()))
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(
        processors=[take],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)
