"""Measures vLLM as the engine of a pool, on a CPU: what Motet's part costs, and what it keeps vLLM from.

The child is the engine's process; here it runs as a library, beside `LLM.generate` in a process that is started alike,
with the same slots for adapters and threads bound to the same cores. Both have the model, requests and rules of
`benchmarks.peer_engines`. `child_plain_*` is beside an `LLM` without LoRA, which torch compiles: with LoRA, vLLM does
not compile on a CPU. `child_masked_32` is the child alone, with 16 rows of 32 that follow a JSON schema, and without: a
random model's choices are mostly refused, so these rows need a mask for nearly each token.

`own_server_*` is the whole product beside vLLM's own server, with the same client; `own_server_plain` is beside a
server without LoRA.

`switch_*`: 64 adapters take turns in 4 slots, while two requests for the base model stream. `gap_while_loading` is the
99th percentile of the time between two of their tokens, as a multiple of the median. `own_preemptions`: 500 streams, of
which every third is promised too little memory. `lost_s`: from SIGKILL of the child, and of one of two workers,
until the service knows: the longer one. It does not use a GPU.

`suites` runs tests with vLLM itself: `contract_failed` of those that all engines pass, with pages of 32 and 128 tokens
and with two workers, unless there is one GPU; `adapters_wrong` of four families beside PEFT, and `moved_wrong` of JSON
answers that move from a killed process. Mutants are another command, `python -m tools.mutate.vllm`.

    python -m benchmarks.external [--cases base sampled …] [--requests 8 32] [--pairs 5] [--switches 2000]
        [--streams 500] [--json]
"""

import argparse
import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks.driven import Driven, DrivenError
from benchmarks.engine_run import random_prompt
from benchmarks.harness import ROOT, Result, arguments, percentile, report, skip
from benchmarks.peer_engines import FEW, Case, Comparison, Engines, Workload, shape_of, with_target
from benchmarks.peer_sizes import add_sizes, with_sizes
from benchmarks.random_llama import SCRATCH, random_llama
from benchmarks.vllm_peer import vllm
from benchmarks.vllm_served import Beside, measure_beside
from benchmarks.vllm_setup import environment_of_vllm
from motet.domain import RequestId, pages_for
from motet.settings import ProcessSettings
from motet_runner.engine_client import EngineClient, EngineDied
from motet_runner.engine_messages import Add, EngineOutputs
from motet_runner.external.engine_start import engine_start, source_path
from motet_runner.external.vllm.grammar_package import service_package
from motet_runner.interface import NewSequence, Sampling
from motet_runner.settings import Settings
from tools.peers.environment import folder, python_of
from tools.peers.vllm import VLLM

BASE = (0.97, 0.94)
CASES = {
    "base": Case(name="child_base", ours="base", theirs="base", least={"": BASE}),
    "distinct": Case(name="child_distinct", ours="distinct", theirs="distinct", least={"": BASE}),
    "plain": Case(name="child_plain", ours="base", theirs="base"),
    "sampled": Case(name="child_sampled", ours="base", theirs="base", least={"": (0.95, 0.95)}, temperature=1.0),
    "masked": Case(name="child_masked", ours="base", theirs="base", least={"": (0.85, 0.85)}, requests=32, masked=16),
}
SERVED = (
    Beside("own_server_base", "base", with_lora=True, least=(1.1, 1.1)),
    Beside("own_server_plain", "base", with_lora=False, least=None),
    Beside("own_server_distinct", "distinct", with_lora=True, least=(1.0, 1.0)),
)
OTHERS = ("served", "switch", "pressure", "killed", "suites")
OF_VLLM = "tests/runner/external/test_vllm.py"
SUITES = {
    "contract_failed": ("tests/contract/test_engines.py", "vllm and itself"),
    "adapters_wrong": (OF_VLLM, "adapters_compute_what_peft_computes"),
    "moved_wrong": (OF_VLLM, "json_stays_valid"),
}
"""By result: the file, and which of its tests"""
ON_TWO = "on-two"
"""In the names of tests with two workers"""
GPUS = "import torch; print(torch.cuda.device_count())"

ADAPTERS, SLOTS, AT_ONCE, NEIGHBOURS = 64, 4, 8, 2
SWITCH_PROMPT, SWITCH_TOKENS = 4, 16
"""With long prompts, these would be what neighbours wait for, and not the loads."""
MAX_GAP = 3.0
PRESSURE_PROMPT, PRESSURE_OUTPUT, TOO_SMALL = 24, 48, 8
PRESSURE_KV_MIB, PRESSURE_CONTEXT = 12, 128
"""In float32: for a fifth of the rows that may run together"""
OVERCOMMITS = (1.0, 1.5)
MAX_LOST_SECONDS = 1.0
SHARED_MEMORY = Path("/dev/shm")


def start_child(given: argparse.Namespace, engines: Engines, **changes: Any) -> Driven:
    paths = os.pathsep.join([*source_path(), str(ROOT)])
    command = [given.python, "-P", "-W", "ignore", "-m", "benchmarks.child_driver"]
    load = {
        "adapters": engines.adapters,
        "slots": given.adapters,
        "kv_mib": given.kv_mib,
        "prefix_cache": False,
        "watched": False,
    }
    environment = environment_of_vllm(given) | service_package() | {"PYTHONPATH": paths}
    name = " ".join(["child", *(f"{name} {value}" for name, value in changes.items())])
    return engines.start("llama", name, command, environment, load | changes)


async def measure_child(given: argparse.Namespace, engines: Engines, case: Case) -> list[Result]:
    results = []
    child = start_child(given, engines)
    theirs = child if case.masked else vllm(given, engines, "llama", lora=case.name != "child_plain")
    for requests in [case.requests] if case.requests else given.requests:
        work = Workload(requests=requests, prompt=given.prompt, output=given.output)
        comparison = Comparison(given, case, work, theirs)
        found = await comparison.measure(f"{case.name}_{requests}", theirs.name, engines, [child])
        least = case.least[""][requests > FEW] if case.least else None
        results += [with_target(one, least) if one.pairs is not None and least else one for one in found]
    return results


def measure_switches(given: argparse.Namespace) -> list[Result]:
    given = argparse.Namespace(**vars(given) | {"adapters": ADAPTERS})
    drawn = random.Random(0)
    weights = [1 / rank for rank in range(1, ADAPTERS + 1)]
    question = {
        "do": "beside_loads",
        "prompts": [random_prompt(drawn, SWITCH_PROMPT, given.vocabulary) for _ in range(given.switches)],
        "adapters": drawn.choices(range(ADAPTERS), weights, k=given.switches),
        "output": SWITCH_TOKENS,
        "at_once": AT_ONCE,
        "neighbours": NEIGHBOURS,
    }
    with ExitStack() as stack:
        engines = Engines(given, stack)
        said = start_child(given, engines, slots=SLOTS, watched=True).ask(question)
    usual, longest = (percentile(said["gaps"], share) for share in (0.5, 0.99))
    print(f"switch: {said['loads']} loads, tokens of neighbours every {usual * 1e3:.1f} ms", flush=True)
    gap = longest / usual
    return [
        counted("switch_failed", said["failed"]),
        counted("reads_in_step", said["reads"]),
        Result("gap_while_loading", gap, "x", f"<= {MAX_GAP:g}", gap <= MAX_GAP),
    ]


def measure_pressure(given: argparse.Namespace) -> list[Result]:
    """In float32: then a row has the same tokens, whatever rows are beside it."""
    given = argparse.Namespace(**vars(given) | {"dtype": "float32", "context": PRESSURE_CONTEXT})
    drawn = random.Random(0)
    promises = [TOO_SMALL if number % 3 == 0 else PRESSURE_OUTPUT for number in range(given.streams)]
    question = {
        "do": "under_pressure",
        "prompts": [random_prompt(drawn, PRESSURE_PROMPT, given.vocabulary) for _ in range(given.streams)],
        "output": PRESSURE_OUTPUT,
    }
    with ExitStack() as stack:
        engines = Engines(given, stack)
        child = start_child(
            given, engines, kv_mib=PRESSURE_KV_MIB, watched=True, adapters=[], slots=1, prefix_cache=True
        )
        calm = child.ask(question | {"promises": [PRESSURE_OUTPUT] * given.streams, "overcommit": 1.0})
        said = [child.ask(question | {"promises": promises, "overcommit": one}) for one in OVERCOMMITS]
    wrong = sum(mine != other for one in said for mine, other in zip(one["tokens"], calm["tokens"], strict=True))
    print(f"pressure: parked {[one['parked'] for one in said]} times, without pressure {calm['parked']}", flush=True)
    return [
        counted("streams_wrong", wrong),
        counted("own_preemptions", sum(one["preempted"] for one in [calm, *said])),
    ]


async def measure_lost(given: argparse.Namespace) -> list[Result]:
    found = [await lost(given, workers=workers) for workers in (1, 2)]
    print("killed: known {:.3f} s after the child is, and {:.3f} s after a worker".format(*(one for one, _ in found)))
    longest = max(seconds for seconds, _ in found)
    return [
        Result("lost_s", longest, "s", f"<= {MAX_LOST_SECONDS:g}", longest <= MAX_LOST_SECONDS),
        counted("left_behind", sum(left for _, left in found)),
    ]


async def lost(given: argparse.Namespace, *, workers: int) -> tuple[float, int]:
    """How long nobody knows that the child has been killed or, with several workers, one of them; and how many
    processes and pieces of shared memory are left. It is started without the libraries that vLLM likes to start with,
    as the service does."""
    settings = Settings(
        backend="vllm",
        engine_python=given.python,
        dtype=given.dtype,
        kv_cache_mib=given.kv_mib,
        max_lora_rank=given.rank,
        tensor_parallel=workers,
    )
    model = random_llama(shape_of("llama", given), SCRATCH)
    before = set(SHARED_MEMORY.iterdir())
    command, variables = engine_start(settings)
    with tempfile.TemporaryDirectory() as scratch:
        process = ProcessSettings(data_dir=Path(scratch))
        client = EngineClient(settings.engine_config(model), process, command, {"TMPDIR": scratch, **variables})
        await client.start()
        try:
            info = await client.loaded(lambda *_: None)
            sampling = Sampling(max_tokens=given.context // 2, ignore_eos=True)
            promise = pages_for(given.context, info.page_tokens)
            request = NewSequence(request=RequestId("a"), epoch=1, prompt=(5, 6, 7), promise=promise, sampling=sampling)
            client.post(Add(request, 1, 0.0))
            begun = asyncio.Event()

            def receive(_: EngineOutputs) -> None:
                begun.set()

            running = asyncio.create_task(client.run(receive))
            await begun.wait()
            processes = [child := psutil.Process(client.pid), *child.children(recursive=True)]
            victims = processes if workers == 1 else [one for one in processes if is_worker(one)]
            victims[0].kill()
            killed = time.perf_counter()
            try:
                await running
            except EngineDied:
                seconds = time.perf_counter() - killed
        finally:
            await client.stop()
    _, left = psutil.wait_procs(processes, timeout=MAX_LOST_SECONDS)
    alive = [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]  # else it has ended
    return seconds, len(alive) + len(set(SHARED_MEMORY.iterdir()) - before)


def is_worker(process: psutil.Process) -> bool:
    return any("VLLM::Worker" in part for part in process.cmdline())


def counted(name: str, found: int) -> Result:
    return Result(name, found, "", "= 0", found == 0, counted=True)


def measure_suites(given: argparse.Namespace) -> list[Result]:
    results, env = [], os.environ | {VLLM.named_by: str(given.python.parent.parent)}
    without = f" and not {ON_TWO}" if gpus_of(given.python) == 1 else ""
    for name, (file, which) in SUITES.items():
        with tempfile.TemporaryDirectory() as scratch:
            found = Path(scratch) / "found.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-m", "soak", "--timeout=7200", f"--junit-xml={found}"]
            subprocess.run(
                [*command, file, "-k", f"({which}){without}"], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, check=False
            )
            failed, passed = outcomes(found.read_text()) if found.exists() else (0, 0)
        print(f"{name}: {passed} tests passed", flush=True)
        results.append(Result(name, failed, "", "= 0", passed > 0 and not failed, counted=True))
    return results


def gpus_of(python: Path) -> int:
    """That torch has there; 0 with a build for CPUs, on which two workers need two cores"""
    said = subprocess.run([python, "-P", "-c", GPUS], stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    return int(said) if said.isdecimal() else 0


def outcomes(junit: str) -> tuple[int, int]:
    """How many tests failed, and how many passed. Those that were skipped are neither."""
    counts = re.search(r'<testsuite [^>]*errors="(\d+)" failures="(\d+)" skipped="(\d+)" tests="(\d+)"', junit)
    assert counts is not None, junit[:200]
    errors, failures, skipped, tests = map(int, counts.groups())
    return errors + failures, tests - errors - failures - skipped


def measure_served(given: argparse.Namespace, adapters: list[str]) -> list[Result]:
    """The service starts the child without what vLLM's server is started with here, so a script adds it."""
    given = argparse.Namespace(**vars(given) | {"requests": [min(given.requests)]})
    model = random_llama(shape_of("llama", given), SCRATCH)
    with tempfile.TemporaryDirectory() as scratch:
        python = Path(scratch) / "python"
        of_vllm = " ".join(f"'{name}={value}'" for name, value in environment_of_vllm(given).items())
        python.write_text(f'#!/bin/sh\nexec env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT {of_vllm} {given.python} "$@"\n')
        python.chmod(0o755)
        engine = {"backend": "vllm", "maxLoraRank": given.rank}
        env = {"MOTET_RUNNER_ENGINE_PYTHON": str(python)}
        return measure_beside(given, model, adapters, SERVED, engine=engine, env=env)


async def measure_engines(given: argparse.Namespace, engines: Engines) -> list[Result]:
    results = []
    for name in (name for name in given.cases if name in CASES):
        try:
            results += await measure_child(given, engines, CASES[name])
        except DrivenError as error:
            if "StructuredOutputUnavailable" not in str(error):
                raise
            print(f"{CASES[name].name}: not measured, the child serves no masks", flush=True)
    return results


def main() -> None:
    # Otherwise the stopped processes would outlive this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = arguments(__doc__)
    default = python_of(folder(VLLM, os.environ))
    parser.add_argument("--python", type=Path, default=default, help="the Python of an environment with vLLM")
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *OTHERS], default=[*CASES, *OTHERS])
    add_sizes(parser)
    parser.add_argument("--switches", type=int, default=2000, help="requests of 64 adapters in 4 slots")
    parser.add_argument("--streams", type=int, default=500, help="of which every third is promised too little")
    given = with_sizes(parser.parse_args())
    given.vllm_threads, given.vllm_eager, given.vllm_processes = None, False, False
    if not given.python.exists():
        skip(f"{given.python} does not exist. `make peer` builds an environment with vLLM; --python names another one.")
    results = []
    with ExitStack() as stack:
        engines = Engines(given, stack)
        results += asyncio.run(measure_engines(given, engines))
        adapters = engines.adapters if "served" in given.cases else []
        for driven in engines.running:
            driven.stop()
        if "served" in given.cases:
            results += measure_served(given, adapters)
    if "switch" in given.cases:
        results += measure_switches(given)
    if "pressure" in given.cases:
        results += measure_pressure(given)
    if "killed" in given.cases:
        results += asyncio.run(measure_lost(given))
    if "suites" in given.cases:
        results += measure_suites(given)
    if not results:
        skip("nothing was measured")
    report("external", results, as_json=given.json)


if __name__ == "__main__":
    main()
