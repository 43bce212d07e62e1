"""The step trace: one JSON line per iteration. Promises, parks and resumes are on the line of their iteration. After
the first failed write, the trace ends, and the engine goes on.

The first line, and the first line after a change of kernels, also say what is timed: machine, model, kernels, and the
limits of batches. `motet profile` learns the costs of iterations from the trace.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from motet.domain import RequestId
from motet.line_file import LineFile
from motet_runner.interface import Event, OverflowAhead, ParkedNow, ResumedNow, State
from motet_runner.plan import Planner, StepPlan, StepResult

_KINDS = (("overflows", OverflowAhead), ("parks", ParkedNow), ("resumes", ResumedNow))


class StepTrace:
    def __init__(self, path: Path | None, *, of: Callable[[], dict[str, Any]]) -> None:
        """`of` is called for the first line and after a change of kernels, and says what is timed."""
        self._file = LineFile(path, stopped="step_trace_stopped") if path is not None else None
        self._of = of
        self._kernels: str | None = None
        self._promises: dict[RequestId, int] = {}
        self._changed: dict[RequestId, int] = {}
        """Promises that no line has yet"""

    def note_promises(self, planner: Planner) -> None:
        """Also called before the results of an iteration are taken: some answers end with their first token."""
        if self._file is None or not self._file.open:
            return
        promises = {s.request: s.promise for s in planner.sequences if s.state is not State.PARKED}
        self._changed |= {request: pages for request, pages in promises.items() if self._promises.get(request) != pages}
        known = {s.request: self._promises.get(s.request, 0) for s in planner.sequences}
        self._promises = known | promises

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
        if self._file is None or not self._file.open:
            return
        memory = planner.memory
        line: dict[str, Any] = {
            "step": plan.number,
            "ms": round(seconds * 1000, 3),
            "prefill": plan.prefill_tokens,
            "decode": len(plan.decodes),
            "context": plan.decodes.context,
            "attended": sum(row.count * row.start + row.count * (row.count + 1) // 2 for row in plan.prefills),
            "adapters": len(plan.adapters),
            "pages": memory.pages.capacity - memory.pages.free,
            "shared": memory.pages.repeated,
            "cached": len(memory.cache),
            "calls": result.model_calls,
            "attention": result.attention_calls,
            "padding": result.padding,
        }
        if plan.moves:
            line["moved"] = sum(map(len, plan.moves))
        if cycle is not None:
            line["cycle"] = round(cycle * 1000, 3)
        self.note_promises(planner)
        if self._changed:
            line["promises"], self._changed = self._changed, {}
        for name, kind in _KINDS:
            happened = [event for event in events if isinstance(event, kind)]
            if happened:
                line[name] = [_said_of(event) for event in happened]
        if not plan.count and not line.keys() & {"promises", "overflows", "parks", "resumes"}:
            return
        if kernels != self._kernels:
            self._kernels = kernels
            line["of"] = self._of()
        self._file.append(json.dumps(line).encode() + b"\n")


def _said_of(event: Event) -> dict[str, Any]:
    if isinstance(event, OverflowAhead):
        return {"request": event.request, "promise": event.promise, "number": event.number}
    return {key: value for key, value in asdict(event).items() if key != "epoch"}
