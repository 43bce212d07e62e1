"""`motet workload`: makes workloads, converts traces to Motet's form, and says what is in one."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from motet_cli.printer import Printer
from motet_simulator.output_file import output_file
from motet_simulator.quantiles import quantile
from motet_simulator.workloads.complete import Completion, workload
from motet_simulator.workloads.jsonl import write
from motet_simulator.workloads.request import WorkloadRequest


def write_to(requests: Iterator[WorkloadRequest], output: Path | None) -> int:
    if output is None:
        write(requests, sys.stdout)
        return 0
    with output_file(output) as file:
        written = write(requests, file)
    Printer(to_errors=True).line(f"{output}: {written} requests")
    return 0


def show(file: Path, completion: Completion) -> int:
    prompts: list[float] = []
    outputs: list[float] = []
    adapters: Counter[str] = Counter()
    tenants: set[str] = set()
    last = 0.0
    for request in workload(file, completion):
        prompts.append(request.prompt_tokens)
        outputs.append(request.output_tokens)
        adapters[request.adapter] += 1
        tenants.add(request.tenant)
        last = request.at
    printer = Printer(width_of_a_pipe=200)
    printer.line(
        f"{len(prompts)} requests in {last:.0f} s, {len(adapters.keys() - {''})} adapters, "
        f"{len(tenants - {''})} tenants"
    )
    if not prompts:
        return 0
    printer.table(
        ("tokens", "mean", "p50", "p95", "most"),
        [
            (
                name,
                f"{sum(values) / len(values):.1f}",
                *(f"{quantile(values, level):.0f}" for level in (0.5, 0.95, 1.0)),
            )
            for name, values in (("prompt", prompts), ("output", outputs))
        ],
    )
    named = [(name, count) for name, count in adapters.most_common(6) if name][:5]
    if named:
        printer.table(
            ("adapter", "requests"), [(name, f"{count} ({100 * count / len(prompts):.1f} %)") for name, count in named]
        )
    return 0
