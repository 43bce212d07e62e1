"""What the parts of an iteration take on the host, each without the parts that it calls."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from motet_runner.engine import Engine

Parts = list[dict[str, float]]
"""Seconds by part, for each iteration"""


@contextmanager
def parts_of(engine: Engine) -> Iterator[Parts]:
    """Measures each iteration of the engine until the context ends. Two readings of the clock a part are in it."""
    iterations: Parts = []
    inner = [0.0]  # of the parts under way, what the parts took that they have called

    def measured(owner: Any, name: str, part: str) -> Any:
        function = getattr(owner, name)

        def timed(*given: Any, **more: Any) -> Any:
            if part == "engine":
                iterations.append({})
            inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*given, **more)
            finally:
                seconds = time.perf_counter() - began
                now = iterations[-1]
                now[part] = now.get(part, 0.0) + seconds - inner.pop()
                inner[-1] += seconds

        return patch.object(owner, name, timed)

    worker, planner = engine.diagnostics.worker, engine.diagnostics.planner
    with ExitStack() as stack:
        for owner, name, part in (
            (engine, "step", "engine"),
            (planner, "plan", "plan"),
            (worker, "launch", "worker"),
            (worker.builder, "build", "batch"),
            (engine.diagnostics.store, "clear", "clear pages"),
            (engine.diagnostics.loaded, "fused", "model"),
            (worker.sampler, "sample", "sample"),
            (planner, "collect", "collect"),
        ):
            stack.enter_context(measured(owner, name, part))
        yield iterations
