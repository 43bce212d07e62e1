"""Measures the kernels and the engine on a GPU, goal by goal, each beside its floor, a plain read and its baselines.

The goals are in parts of at most eight minutes. Each figure is kept in a file as soon as it is there, so a part that
dies keeps what it had; several parts may add to one file. The ways that are compared become CUDA graphs and alternate,
with weights that no cache holds. Before anything is timed, it is compared with fp64.

    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --part 2 [--vllm-kernels FOLDER] [--vllm-python FILE] [--results FILE] [--json]
    python -m benchmarks.gpu --rehearse [--goals G1 G12]

A rehearsal runs all of this without a GPU, in Triton's interpreter, at tiny sizes. It measures nothing. Without a GPU
and without `--rehearse`, only that is printed which can be counted without one.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.gpu_goals.bench import Bench, bench_here, gpu_here
from benchmarks.gpu_goals.figures import Figure
from benchmarks.gpu_goals.goals import GOALS, PART_MINUTES, PARTS, Goal
from benchmarks.gpu_goals.kept import BENCHMARK, Kept
from benchmarks.harness import MISSED, ROOT, SKIPPED, arguments, report, skip
from motet_kernels.gpu import triton_is_here
from testbed.interpreter import leave_out_what_nobody_reads

END_SECONDS = 10.0
"""For what was told to end, before it is killed"""
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def measure(goals: Iterable[Goal], bench: Bench, kept: Kept) -> bool:
    """Whether all of them could be measured to the end. One that cannot does not keep the next one from its turn."""
    complete = True
    for goal in goals:
        print(f"== {goal.name}: {goal.title}", flush=True)
        failure, names, missing = "", list[str](), dict[str, str]()
        try:
            with torch.no_grad():  # some baselines fail in torch's inference mode
                for figure in goal.figures(bench):
                    names.append(figure.name)
                    kept.add(goal.name, figure)
                    missing |= {name: one.missing for name, one in figure.against.items() if one.missing}
                    if not bench.rehearsal:
                        show(figure)
        except Exception as error:
            complete = False
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
            traceback.print_exc(file=sys.stdout)
            print(f"{goal.name} FAILED after {len(names)} figures: {failure}", flush=True)
        kept.ended(goal.name, failure)
        if bench.rehearsal and not failure:
            print(f"{goal.name} rehearsed: {len(names)} figures", flush=True)
            for name, why in missing.items():
                print(f"    {name} not rehearsed: {why}", flush=True)
    return complete


def measure_apart(goals: Iterable[Goal], kept: Kept, minutes: float, arguments: Sequence[str]) -> bool:
    """Each in a process of its own, because an error of the device ends all work of its process. What does not end in
    `minutes`, all together, is ended and said. Whether all of them could be measured to the end"""
    complete, until = True, time.monotonic() + 60 * minutes
    for goal in goals:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu",
            "--goals",
            goal.name,
            "--results",
            str(kept.path),
            *arguments,
        ]
        left = until - time.monotonic()
        try:
            if left <= 0:
                raise subprocess.TimeoutExpired(command, left)
            status = run_as_group(command, left)
        except subprocess.TimeoutExpired:
            kept.read_again()
            kept.ended(goal.name, f"not measured to its end within --minutes {minutes:g}")
            print(f"{goal.name} was not measured to its end: the {minutes:g} minutes are over", flush=True)
            complete = False
            continue
        kept.read_again()
        if status not in (0, 1, MISSED):
            kept.ended(goal.name, f"its process ended with {status}")
            print(f"{goal.name} FAILED: its process ended with {status}", flush=True)
        complete = complete and status in (0, MISSED)
    return complete


def run_as_group(command: Sequence[str], seconds: float) -> int:
    """Its status. What it has started ends with it, also when the time is over."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def show(figure: Figure) -> None:
    verdict = {True: "holds", False: "MISSED", None: ""}[figure.holds]
    floor = "" if figure.floor is None else f"  floor {figure.floor:.4g}"
    twin = "" if figure.twin is None else f"  read {figure.twin:.4g}"
    print(f"{figure.name:<44} {figure.value:>10.4g} {figure.unit:<10} {figure.target:<10}{floor}{twin}  {verdict}")
    for name, one in figure.against.items():
        said = one.missing if one.pairs is None else f"{one.pairs.ratio:.3g} x ours"
        goal = "" if one.at_least is None else f" (>= {one.at_least:g})"
        print(f"    {name}: {said}{goal}", flush=True)


def list_goals() -> None:
    for number, part in enumerate(PARTS, 1):
        print(f"part {number}, at most {PART_MINUTES} minutes")
        for goal in part:
            print(f"  {goal.name:<4} {goal.title}: {goal.target}")


def without_gpu(*, as_json: bool) -> NoReturn:
    """Print what can be counted without a card; for the rest, that it waits for one."""
    from benchmarks.gpu_goals.counted import counted

    for goal in GOALS.values():
        print(f"{goal.name}: waiting for a card")
    print("skipped: there is no CUDA device. What follows is counted. `--rehearse` runs all else without one.")
    report(BENCHMARK, counted(), as_json=as_json)
    sys.exit(SKIPPED)


def rehearse(goals: Sequence[Goal], bench: Bench) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return measure(goals, bench, Kept(Path(folder) / "gpu.json", {}))


def again_in_interpreter() -> NoReturn:
    """Triton decides whether it interprets when it is imported, and torch imports it: so in another process."""
    command = [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=os.environ | INTERPRETED, check=False).returncode)


def main() -> None:
    parser = arguments(__doc__)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--part", type=int, choices=range(1, len(PARTS) + 1), help="measure only this part")
    chosen.add_argument("--goals", nargs="+", choices=list(GOALS), metavar="GOAL", help="measure only these")
    parser.add_argument("--list", action="store_true", help="say which part has which goals, and end")
    parser.add_argument("--rehearse", action="store_true", help="run everything at tiny sizes, and measure nothing")
    parser.add_argument("--results", type=Path, help="the file that figures are kept in, build/gpu.json if not given")
    parser.add_argument(
        "--minutes", type=float, default=PART_MINUTES, help=f"end what takes longer, all together: {PART_MINUTES}"
    )
    parser.add_argument("--vllm-kernels", type=Path, metavar="FOLDER", help="vLLM's vllm/lora/ops/triton_ops")
    parser.add_argument("--vllm-python", type=Path, metavar="FILE", help="for G20: the Python of vLLM's environment")
    given = parser.parse_args()
    if given.list:
        list_goals()
        return
    if given.rehearse and given.results:
        parser.error("a rehearsal measures nothing: it keeps no --results")
    if not triton_is_here():
        skip("Triton is not installed")
    cuda = torch.cuda.is_available() and not given.rehearse
    if not cuda and os.environ.get("TRITON_INTERPRET") != "1":
        again_in_interpreter()
    if given.vllm_kernels is not None:
        from benchmarks.gpu_goals.vllm_kernels import lacking

        if names := lacking(given.vllm_kernels):
            parser.error(f"--vllm-kernels {given.vllm_kernels} lacks {', '.join(names)}")
    goals = (
        [GOALS[name] for name in given.goals]
        if given.goals
        else PARTS[given.part - 1]
        if given.part
        else [*GOALS.values()]
    )
    if given.rehearse:
        leave_out_what_nobody_reads()
        sys.exit(0 if rehearse(goals, bench_here(given.vllm_kernels, given.vllm_python)) else 1)
    if not cuda:
        without_gpu(as_json=given.json)
    kept = Kept(given.results or ROOT / "build" / "gpu.json", gpu_here())
    if len(goals) > 1 or given.part:  # a part of one goal has its minutes, too
        named = {"--vllm-kernels": given.vllm_kernels, "--vllm-python": given.vllm_python}
        vllm = [str(part) for option in named.items() if option[1] is not None for part in option]
        complete = measure_apart(goals, kept, given.minutes, vllm)
    else:
        complete = measure(goals, bench_here(given.vllm_kernels, given.vllm_python), kept)
    if given.json:
        print(json.dumps(kept.document))
    if not complete:
        sys.exit(1)
    if kept.missed([goal.name for goal in goals]):
        sys.exit(MISSED)


if __name__ == "__main__":
    main()
