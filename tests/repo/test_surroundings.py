"""No shell that a simulation runs takes time, chance or a thread by itself: its process hands it its surroundings."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.tree import ROOT

SHELLS = [
    "services/common/motet/leadership.py",
    "services/common/motet/lease.py",
    "services/common/motet/task_group.py",
    "services/scheduler/motet_scheduler",
    "services/supervisor/motet_supervisor",
    "services/predictor/motet_predictor/service.py",
    "services/predictor/motet_predictor/length_model.py",
    "services/predictor/motet_predictor/persistence.py",
    "services/gateway/motet_gateway/catalog.py",
    "services/gateway/motet_gateway/dispatcher.py",
    "services/gateway/motet_gateway/estimator.py",
    "services/gateway/motet_gateway/generation.py",
    "services/gateway/motet_gateway/held_requests.py",
    "services/gateway/motet_gateway/loss_limits.py",
    "services/gateway/motet_gateway/metrics.py",
    "services/gateway/motet_gateway/pauses.py",
    "services/gateway/motet_gateway/runner_streams.py",
    "services/gpu-runner/motet_runner/accepted_requests.py",
    "services/gpu-runner/motet_runner/adapters/policy",
    "services/gpu-runner/motet_runner/adapters/registry.py",
    "services/gpu-runner/motet_runner/engine_loop.py",
    "services/gpu-runner/motet_runner/engine_messages.py",
    "services/gpu-runner/motet_runner/generate_service.py",
    "services/gpu-runner/motet_runner/hang_detector.py",
    "services/gpu-runner/motet_runner/loaded_runner.py",
    "services/gpu-runner/motet_runner/metrics.py",
    "services/gpu-runner/motet_runner/plan",
    "services/gpu-runner/motet_runner/runner_facts.py",
    "services/gpu-runner/motet_runner/scheduler_link.py",
    "services/gpu-runner/motet_runner/step_outbox.py",
    "services/gpu-runner/motet_runner/supervisor_link.py",
    "operator/motet_operator/adapter_reports.py",
    "operator/motet_operator/awaited_reports.py",
    "operator/motet_operator/reconcile",
    "operator/motet_operator/sync.py",
]
"""What a simulation runs as it is, without `__main__`, which makes the real surroundings."""

MEASURE_THE_MACHINE = [
    "services/gpu-runner/motet_runner/adapters/module_patterns.py",
    "services/gpu-runner/motet_runner/engine.py",
    "services/gpu-runner/motet_runner/execute",
    "services/gpu-runner/motet_runner/memory",
]
"""Parts of the real engine and of checks in a child process. Their clock measures what this machine needs."""

REAL_FUNCTIONS = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "thread_time", "sleep"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
    "asyncio": {"to_thread"},
    "os": {"urandom"},
}
REAL_MODULES = {"secrets", "uuid", "threading", "socket", "subprocess", "concurrent", "multiprocessing"}
REAL_NAMES = {"monotonic", "real_surroundings", "ThreadWatchdog", "RealDisk"}


def real_things(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything that only a real process has."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="random"), attr=name) if name != "Random":
                yield node.lineno, f"random.{name}"
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in REAL_FUNCTIONS.get(module, ()):
                yield node.lineno, f"{module}.{name}"
            case ast.Attribute(attr="run_in_executor"):
                yield node.lineno, "run_in_executor"
            case ast.Import(names=names):
                yield from ((node.lineno, one.name) for one in names if one.name.partition(".")[0] in REAL_MODULES)
            case ast.ImportFrom(module=module, names=names):
                root = (module or "").partition(".")[0]
                for one in names:
                    taken = one.name in REAL_FUNCTIONS.get(root, ()) or one.name in REAL_NAMES or root in REAL_MODULES
                    if taken or (root == "random" and one.name != "Random"):
                        yield node.lineno, f"{module}.{one.name}"


def real_defaults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything real that is used when nobody says what to use."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for default in (*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None)):
                yield from real_things(default)
                for name in ast.walk(default):
                    if isinstance(name, ast.Name) and name.id in REAL_NAMES:
                        yield name.lineno, name.id


def files(places: list[str]) -> list[Path]:
    found = [path for place in places for path in (sorted((ROOT / place).rglob("*.py")) or [ROOT / place])]
    return [path for path in found if path.name != "__main__.py"]


def test_no_shell_of_a_simulation_takes_what_is_real_by_itself():
    taken = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(SHELLS)
        for line, name in real_things(ast.parse(path.read_text()))
    ]
    assert taken == [], "let the process hand it over (motet.surroundings)"


def test_no_default_argument_of_a_service_holds_a_real_clock():
    measuring = set(files(MEASURE_THE_MACHINE))
    held = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files(["services"])
        if path not in measuring
        for line, name in real_defaults(ast.parse(path.read_text()))
    ]
    assert held == []


def test_every_place_named_here_exists():
    assert [place for place in SHELLS + MEASURE_THE_MACHINE if not (ROOT / place).exists()] == []


@pytest.mark.parametrize(
    "source",
    [
        "import time\nnow = time.monotonic()",
        "from time import time",
        "import random\nrandom.uniform(0, 1)",
        "from random import choice",
        "import secrets",
        "import uuid",
        "from threading import Thread",
        "from concurrent.futures import Future",
        "from datetime import datetime\ndatetime.now()",
        "import asyncio\nawait_me = asyncio.to_thread(print)",
        "loop.run_in_executor(None, print)",
        "from motet.clock import monotonic",
        "from motet.surroundings import real_surroundings",
        "import os\nos.urandom(4)",
        "import socket",
    ],
)
def test_this_test_sees(source):
    assert list(real_things(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "def f(clock=monotonic): ...",
        "def f(*, clock=time.time): ...",
        "async def f(*, now=lambda: datetime.now(UTC)): ...",
        "g = lambda clock=monotonic: clock",
    ],
)
def test_this_test_sees_defaults(source):
    assert list(real_defaults(ast.parse(source)))
