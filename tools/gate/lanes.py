"""Runs each lane of tests as a pytest process, and prints its lines as they come."""

import asyncio
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from tools.gate.plan import SIDE_BY_SIDE, Lane
from tools.gate.summary import counts_of, cpu_of_tests, failed_tests, seconds_of_tests

MAX_LINE_BYTES = 1 << 24
UNCOMPILED = "PYTHONDONTWRITEBYTECODE"
"""With this variable, each process that a test starts would compile the product's modules again."""
CAME_TO_ITS_END = (0, 1)
"""Statuses of pytest: all passed, some failed."""


@dataclass
class LaneResult:
    lane: Lane
    status: int
    seconds: float
    counts: Counter[str]
    failure_lines: list[str]
    """The lines that name what failed."""
    tests: dict[str, float]
    """The seconds of each test."""
    failed: list[str] = field(default_factory=list)
    """Tests that failed or could not be set up."""
    cpu_seconds: float = 0.0
    """Of pytest and all processes that it, and they, waited for."""
    cpu: dict[str, float] = field(default_factory=dict)
    """The CPU seconds of each test."""

    @property
    def came_to_its_end(self) -> bool:
        return self.status in CAME_TO_ITS_END


class Lanes:
    def __init__(self, lanes: tuple[Lane, ...], say: Callable[[str], None]) -> None:
        self._lanes = lanes
        self._say = say
        self._cores = os.cpu_count() or 1
        self._side_by_side = min(SIDE_BY_SIDE, len(lanes)) if self._cores > 1 else 1
        self._places = asyncio.Semaphore(self._side_by_side)
        self._processes: list[asyncio.subprocess.Process] = []
        self._stopped = False
        self._cpu_counted = _cpu_of_ended_processes()

    async def run(self) -> list[LaneResult]:
        """Run all lanes, SIDE_BY_SIDE at a time. On one core, run them one after the other."""
        for one in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(one, self._stop)
        return list(await asyncio.gather(*map(self._run, self._lanes)))

    def _stop(self) -> None:
        """Send SIGINT to every lane, also after a SIGTERM: a killed pytest would leave processes behind."""
        self._stopped = True
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(signal.SIGINT)

    async def _run(self, lane: Lane) -> LaneResult:
        async with self._places:
            return await self._run_now(lane)

    async def _run_now(self, lane: Lane) -> LaneResult:
        began = time.monotonic()
        if self._stopped:
            return LaneResult(lane, int(signal.SIGINT), 0.0, Counter(), [], {})
        with tempfile.TemporaryDirectory(prefix="motet-gate-") as folder:
            report = Path(folder) / "report.xml"
            process = await self._start(lane, report)
            counts, failure_lines = await self._read(lane, process)
            status = await process.wait()
            cpu_seconds = _cpu_of_ended_processes() - self._cpu_counted
            self._cpu_counted += cpu_seconds
            ended = report.exists()
            said = ET.parse(report).getroot() if ended else ET.Element("nothing")  # noqa: S314 pytest wrote it
        if not ended:  # the status may be 0 all the same
            failure_lines.append(f"ERROR lane {lane.name} ended with status {status} before all its tests had run")
            counts, status = Counter({"error": 1}), status or 1
        seconds = time.monotonic() - began
        return LaneResult(
            *(lane, status, seconds, counts, failure_lines, seconds_of_tests(said)),
            failed=failed_tests(said),
            cpu_seconds=cpu_seconds,
            cpu=cpu_of_tests(said),
        )

    async def _start(self, lane: Lane, report: Path) -> asyncio.subprocess.Process:
        threads = max(1, self._cores // self._side_by_side)
        # A shared cache would not work: each run stores there which tests failed.
        own = ("-o", f"cache_dir=.pytest_cache/{lane.name}", "-o", "junit_family=xunit1", f"--junitxml={report}")
        plugin = ("-p", "tools.gate.cpu_plugin")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pytest", *plugin, *lane.arguments, *own),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"OMP_NUM_THREADS": str(threads)}
            | {name: os.environ[name] for name in os.environ if name != UNCOMPILED},
            limit=MAX_LINE_BYTES,
            process_group=0,  # a terminal's ctrl-C reaches the lanes through `_stop`, once
        )
        self._processes.append(process)
        return process

    async def _read(self, lane: Lane, process: asyncio.subprocess.Process) -> tuple[Counter[str], list[str]]:
        assert process.stdout is not None
        counts, failure_lines = Counter[str](), []
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip("\n")
            counts = closing if (closing := counts_of(line)) is not None else counts
            if line.startswith(("FAILED ", "ERROR ")):
                failure_lines.append(line)
            self._say(line if len(self._lanes) == 1 else f"{lane.name:>8} | {line}")
        return counts, failure_lines


def _cpu_of_ended_processes() -> float:
    """A process counts once it was waited for: what is added when a lane ends is that lane's own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
