"""`make test`: runs the tests that this machine can run, in lanes side by side, with one closing line for all.

    python -m tools.gate [--no-kube] [--slowest N] [--rerun N] [-- arguments of pytest]

plan.py decides what to run, compiled.py prepares the tree, lanes.py runs it, and summary.py counts the results.

pytest-xdist would replace lanes.py alone, and its workers share no order of files and no fixture: each worker that gets
a test of a cluster would start a control plane of its own. pytest-testmon leaves out tests by the Python code that they
run in pytest's own process, but most of ours use charts and pages, or start the product as processes.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tools.gate import records, reruns
from tools.gate.compiled import compile_modules
from tools.gate.cores import CoreTime
from tools.gate.lanes import LaneResult, Lanes
from tools.gate.plan import MachineFacts, RunPlan, RunRecord, alone, announced, plan, spelled
from tools.gate.summary import closing_line, exit_status, may_run_again, passed_again, seconds_of_files, slowest
from tools.kube.binaries import MODULES, NOT_NEEDED_BESIDE_A_CLUSTER, find, uses_existing_cluster


def say(text: str = "") -> None:
    print(text, flush=True)  # noqa: T201


def read_machine_facts() -> MachineFacts:
    existing = uses_existing_cluster()
    tools = [tool for module in MODULES for tool, _ in module.packages]
    wanted = [tool for tool in tools if not (existing and tool in NOT_NEEDED_BESIDE_A_CLUSTER)]
    return MachineFacts(
        missing_tools=tuple(tool for tool in wanted if find(tool) is None),
        go=shutil.which("go") is not None,
        root=os.geteuid() == 0,
        own_cluster=not existing,
        strict=bool(os.environ.get("CI")),
    )


def names_paths(arguments: list[str]) -> bool:
    return any(not word.startswith("-") and Path(word.partition("::")[0]).exists() for word in arguments)


def record_run(chosen: RunPlan, ran: list[LaneResult], seconds: float) -> None:
    if not chosen.whole or not all(one.came_to_its_end for one in ran):
        return
    lanes = {one.lane.name: round(one.seconds, 1) for one in ran}
    files = seconds_of_files({name: took for one in ran for name, took in one.tests.items()})
    cpu_lanes = {one.lane.name: round(one.cpu_seconds, 1) for one in ran}
    cpu_files = seconds_of_files({name: used for one in ran for name, used in one.cpu.items()})
    records.write(chosen.kind, RunRecord(round(seconds, 1), lanes, files, cpu_lanes, cpu_files))


def rerun_failed(ran: list[LaneResult], max_files: int) -> LaneResult | None:
    """Run failed tests once more, with nothing beside them, if all failures are in few files."""
    failed = [test for one in ran for test in one.failed]
    counts = sum((one.counts for one in ran), Counter[str]())
    if not all(one.came_to_its_end for one in ran) or not may_run_again(failed, counts, max_files):
        return None
    say("These tests failed. They run once more, with nothing beside them:")
    for test in failed:
        say(f"  {test}")
    (once_more,) = asyncio.run(Lanes((alone(failed),), say).run())
    return once_more


def record_reruns(ran: list[LaneResult], once_more: LaneResult | None) -> list[str]:
    """Write down which tests needed a rerun. Returns those that have needed too many."""
    if not all(one.came_to_its_end for one in ran):
        return []
    needed = []
    if once_more is not None and once_more.came_to_its_end:
        needed = [test for one in ran for test in one.failed if test not in once_more.failed]
    try:
        kept = reruns.read()
    except reruns.DamagedLedger as damaged:
        say(str(damaged))
        kept = {}
    files = seconds_of_files({name: took for one in ran for name, took in one.tests.items()})
    contents = reruns.contents_of(files)
    ledger = reruns.counted(kept, contents, needed)
    reruns.write(ledger)
    return reruns.too_often(ledger, contents, needed)


def print_summary(
    ran: list[LaneResult],
    once_more: LaneResult | None,
    too_often: list[str],
    *,
    seconds: float,
    count: int,
) -> int:
    """Print the summary. Returns the exit status."""
    if count:
        say(f"The {count} slowest tests:")
        took = {name: seconds for one in ran for name, seconds in one.tests.items()}
        used = {name: seconds for one in ran for name, seconds in one.cpu.items()}
        for line in slowest(took, used, count):
            say(line)
    counts, status = sum((one.counts for one in ran), Counter[str]()), exit_status([one.status for one in ran])
    passed = once_more is not None and once_more.status == 0
    if once_more is not None and passed:
        counts = passed_again(counts, once_more.counts["passed"], len(too_often))
        status = 1 if too_often else 0
    if len(ran) > 1 or once_more is not None:
        runs = [*ran, once_more] if once_more is not None else ran
        say(", ".join(f"{one.lane.name}: {spelled(one.seconds)} ({spelled(one.cpu_seconds)} of CPU)" for one in runs))
        for line in (line for one in ran for line in one.failure_lines):
            say(line.replace("FAILED", "RERUN", 1).replace("ERROR", "RERUN", 1) if passed else line)
        for test in too_often:
            say(f"FAILED {test} - it needed a rerun in {reruns.TOO_MANY} of the last {reruns.RUNS} runs of its file")
        say(closing_line(counts, seconds))
    return status


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gate", description="Run the tests.")
    parser.add_argument("--no-kube", action="store_true", help="leave out the tests of a cluster")
    parser.add_argument("--slowest", type=int, default=0, metavar="N", help="name the N slowest tests at the end")
    parser.add_argument(
        "--rerun",
        type=int,
        default=0,
        metavar="N",
        help="run failed tests once more, with nothing beside them, if they are in at most N files",
    )
    parser.add_argument("pytest", nargs="*", help="passed to pytest, after --")
    options = parser.parse_args()
    try:
        machine = read_machine_facts()
    except FileNotFoundError as error:
        sys.exit(f"{error}.")
    chosen = plan(machine, kube=not options.no_kube, asked=options.pytest, paths=names_paths(options.pytest))
    for line in announced(chosen, records.read(chosen.kind) if chosen.whole else None):
        say(line)
    say()
    began, cores = time.monotonic(), CoreTime.now()
    if chosen.build and subprocess.run([sys.executable, "-m", "tools.kube.build"], check=False).returncode:
        say("The Kubernetes tools were not built: tests that need a control plane cannot run.")
    compile_modules(Path())
    ran = asyncio.run(Lanes(chosen.lanes, say).run())
    once_more = rerun_failed(ran, options.rerun)
    seconds = time.monotonic() - began
    record_run(chosen, ran, seconds)
    too_often = record_reruns(ran, once_more) if options.rerun and chosen.whole else []
    if cores is not None and (cores_now := CoreTime.now()) is not None and len(ran) > 1:
        say(f"The machine's cores were busy for {cores_now.busy_since(cores):.0%} of the time.")
    return print_summary(ran, once_more, too_often, seconds=seconds, count=options.slowest)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Stopped.")
