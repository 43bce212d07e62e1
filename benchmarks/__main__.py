"""Runs every benchmark, one after the other: `python -m benchmarks [arguments for each]`.

A benchmark is skipped, and says why, if this machine lacks what it needs. All others run, also after one has failed.
The exit status is 1 if a benchmark missed a target or failed.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import MISSED, SKIPPED

HERE = Path(__file__).parent
NOT_BENCHMARKS = {
    "__init__",
    "__main__",
    "adapter_churn",
    "adapter_dora",
    "adapter_hits",
    "adapter_loads",
    "adapter_proofs",
    "adapter_stack",
    "adapter_traffic",
    "child_driver",
    "cluster_loads",
    "driven",
    "earlier_tree",
    "engine_run",
    "harness",
    "host_parts",
    "gguf_of_llama",
    "llama_cpp_driver",
    "lora_baselines",
    "many_adapters",
    "memory_pressure",
    "misprediction",
    "model_time",
    "own_driver",
    "page",
    "peer_engines",
    "peer_sizes",
    "placements",
    "random_gemma",
    "random_llama",
    "residency",
    "scheduler_catalog",
    "scheduler_load",
    "scheduler_scale",
    "served_stack",
    "traffic",
    "vllm_driver",
    "vllm_served",
    "vllm_setup",
    "virtual_plan",
}
OUTCOMES = {0: "holds", MISSED: "MISSED", SKIPPED: "skipped"}


def run_all(commands: dict[str, Sequence[str]]) -> int:
    """Run each benchmark. Returns 0, or 1 if one of them missed a target or failed."""
    outcomes = {}
    for name, command in commands.items():
        print(f"== {name}", flush=True)
        status = subprocess.run(command, check=False).returncode
        outcomes[name] = OUTCOMES.get(status, f"FAILED with status {status}")
    width = max(map(len, outcomes))
    print("\n".join(["== all", *(f"{name:<{width}}  {outcome}" for name, outcome in outcomes.items())]))
    return int(any(outcome not in (OUTCOMES[0], OUTCOMES[SKIPPED]) for outcome in outcomes.values()))


def main() -> None:
    names = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS)
    sys.exit(run_all({name: [sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]] for name in names}))


if __name__ == "__main__":
    main()
