"""The step trace: one JSON line per iteration. Promises, parks and resumes are on the line of their iteration. The
trace ends at the first failed write: the engine goes on.

The first line also says what is timed: machine, model, kernels, and the limits of batches. So does the first line after
the kernels change. `motet profile` learns the costs of iterations from it.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog

from motet.domain import RequestId
from motet_runner.interface import Event, OverflowAhead, ParkedNow, ResumedNow, State
from motet_runner.plan import Planner, StepPlan, StepResult

log = structlog.get_logger(__name__)

_KINDS = (("overflows", OverflowAhead), ("parks", ParkedNow), ("resumes", ResumedNow))


class StepTrace:
    def __init__(self, path: Path | None, *, of: Callable[[], dict[str, Any]]) -> None:
        """`of` says what is timed. It is called before the first line, and when the kernels change."""
        self._path = path
        self._of = of
        self._kernels: str | None = None
        self._begun = False
        """True if this engine has written a line."""
        self._promises: dict[RequestId, int] = {}

    def write(
        self,
        plan: StepPlan,
        result: StepResult,
        *,
        seconds: float,
        cycle: float | None,
        kernels: str,
        events: list[Event],
        planner: Planner,
    ) -> None:
        """`cycle`: seconds since the previous iteration ended. None: the engine was idle in between."""
        if self._path is None:
            return
        memory = planner.memory
        line: dict[str, Any] = {
            "step": plan.number,
            "ms": round(seconds * 1000, 3),
            "prefill": plan.prefill_tokens,
            "decode": len(plan.decodes),
            "context": sum(plan.decodes.starts) + len(plan.decodes),
            "attended": sum(row.count * row.start + row.count * (row.count + 1) // 2 for row in plan.prefills),
            "adapters": len(plan.adapters),
            "pages": memory.pages.capacity - memory.pages.free,
            "shared": memory.pages.repeated,
            "cached": len(memory.cache),
            "calls": result.model_calls,
            "attention": result.attention_calls,
            "padding": result.padding,
        }
        if cycle is not None:
            line["cycle"] = round(cycle * 1000, 3)
        changed = self._changed_promises(planner)
        if changed:
            line["promises"] = changed
        for name, kind in _KINDS:
            happened = [event for event in events if isinstance(event, kind)]
            if happened:
                line[name] = [
                    {key: value for key, value in asdict(event).items() if key != "epoch"} for event in happened
                ]
        if not plan.count and not line.keys() & {"promises", "overflows", "parks", "resumes"}:
            return
        if kernels != self._kernels:
            self._kernels = kernels
            line["of"] = self._of()
        self._append(self._path, json.dumps(line) + "\n")

    def _append(self, path: Path, line: str) -> None:
        try:
            begun = self._begun or not ends_within_a_line(path)
            with path.open("a") as file:
                file.write(line if begun else "\n" + line)
            self._begun = True
        except OSError as error:
            log.warning("step_trace_stopped", path=str(path), reason=error.strerror or str(error))
            self._path = None

    def _changed_promises(self, planner: Planner) -> dict[RequestId, int]:
        promises = {s.request: s.promise for s in planner.sequences if s.state is not State.PARKED}
        changed = {request: pages for request, pages in promises.items() if self._promises.get(request) != pages}
        known = {s.request: self._promises.get(s.request, 0) for s in planner.sequences}
        self._promises = known | promises
        return changed


def ends_within_a_line(path: Path) -> bool:
    """True if the last line is incomplete, because a runner was killed while it wrote."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
