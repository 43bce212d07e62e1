"""Measures every figure of docs/performance.md, the most important ones first: for a quiet machine and a clean commit.

    python -m benchmarks.page --list
    python -m benchmarks.page [--parts product engines] [--pairs 5]
    python tools/keep_results.py build/page/*.txt
    make generate

What each command prints is also in a file of its own. A part that fails or misses a target keeps no other one from
being measured.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import MISSED, ROOT, commit
from benchmarks.peer_sizes import add_sizes, settings_of, with_sizes


@dataclass(frozen=True)
class Part:
    minutes: float
    """About so long with five pairs on two quiet cores, when vLLM has compiled the models before"""
    command: str


PARTS: dict[str, Part] = {
    "product": Part(4, "vllm_peer --cases http --kernels cpp"),
    "engines": Part(4, "vllm_peer --cases base identical skewed distinct distinct_vs_base generic --kernels cpp"),
    "large": Part(5, "vllm_peer --model 1b --cases base distinct --kernels cpp --requests 8 --prompt 16 --output 16"),
    "llama_cpp": Part(5, "llama_cpp_peer --model 1b --prompt 16 --output 16"),
    "keep": Part(1, "engine --cases kept --kernels fused"),
    "op": Part(1, "lora_op --traffic distinct zipf uniform identical --no-mixed-ranks"),
    "others": Part(2, "engine --cases hf peft --kernels fused"),
    "served": Part(1, "served"),
    "torch": Part(3, "vllm_peer --cases base identical skewed distinct --kernels torch"),
    "torch_forward": Part(2, "engine --cases without_forward --kernels torch"),
    "long": Part(4, "vllm_peer --cases prefill long --kernels cpp"),
    "beside": Part(2, "engine --cases prefill busy demo --kernels fused"),
    "uneven": Part(3, "engine --cases ragged --kernels fused"),
}
"""In the order in which they are measured"""


def settings_of_parts() -> dict[str, list[dict[str, Any]]]:
    """Of each benchmark beside another engine, what the names of its figures do not say"""
    settings: dict[str, list[dict[str, Any]]] = {}
    for part in PARTS.values():
        module, *arguments = part.command.split()
        if module.endswith("_peer"):
            parser = argparse.ArgumentParser(allow_abbrev=False)
            add_sizes(parser)
            given, _ = parser.parse_known_args(arguments)
            settings.setdefault(module, []).append(settings_of(with_sizes(given)))
    return settings


def command_of(part: Part, pairs: int) -> list[str]:
    module, *arguments = part.command.split()
    return [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--pairs", str(pairs), "--json"]


def measure(names: Sequence[str], pairs: int, out: Path) -> list[str]:
    """Returns the parts that failed."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names:  # what an earlier run printed must not be kept if this one ends early
        (out / f"{name}.txt").unlink(missing_ok=True)
    failed = []
    for name in names:
        print(f"== {name}: about {PARTS[name].minutes:g} minutes", flush=True)
        began = time.monotonic()
        with (
            (out / f"{name}.txt").open("w") as file,
            subprocess.Popen(command_of(PARTS[name], pairs), cwd=ROOT, stdout=subprocess.PIPE, text=True) as running,
        ):
            assert running.stdout is not None
            for line in running.stdout:
                file.write(line)
                if not line.startswith("{"):
                    print(line, end="", flush=True)
        print(f"== {name}: {(time.monotonic() - began) / 60:.1f} minutes, status {running.returncode}", flush=True)
        if running.returncode not in (0, MISSED):
            failed.append(name)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only print the commands, and how long each takes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", type=int, default=5, help="quiet pairs of each figure")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "page", help="the folder of what is printed")
    parser.add_argument("--rehearse", action="store_true", help="also on a tree with changes: no figure will be kept")
    given = parser.parse_args()
    if given.list:
        for name in given.parts:
            print(f"{name:<10} {PARTS[name].minutes:>4g} min  {' '.join(command_of(PARTS[name], given.pairs)[1:])}")
        return
    if commit().endswith("+") and not given.rehearse:
        parser.error("this tree has changes that are in no commit, so no figure would be kept. Commit them first.")
    if failed := measure(given.parts, given.pairs, given.out):
        sys.exit(f"failed: {', '.join(failed)}")
    print(f"Keep them: python tools/keep_results.py {given.out}/*.txt && make generate")


if __name__ == "__main__":
    main()
