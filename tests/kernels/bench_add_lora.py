"""What add_lora costs beside the base's linear: `python -m tests.kernels.bench_add_lora [--json]`.

Alternates base, ours and a loop over adapters (A B C C B A …) and reports medians of paired ratios, with their spread.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch

from motet_kernels import Segment, Weights, add_lora, group_of, lay_out

TRAFFIC = {
    "distinct": lambda rows: list(range(rows)),
    "zipf": lambda rows: [int(rows / (1 + row)) % rows for row in range(rows)],
    "identical": lambda rows: [0] * rows,
}


def seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def compare(traffic: str, rows: int, width: int, rank: int, rounds: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(width, width, generator=generator)
    x, y = torch.randn(rows, width, generator=generator), torch.zeros(rows, width)
    owners = sorted(TRAFFIC[traffic](rows))
    slots = {owner: slot for slot, owner in enumerate(dict.fromkeys(owners))}
    weights, group = Weights(width, width, torch.float32, "cpu"), group_of(rank)
    matrices = []
    for slot in slots.values():
        a, b = torch.randn(rank, width, generator=generator), torch.randn(width, rank, generator=generator)
        weights.write(group, slot, a, b)
        matrices.append((a.t().contiguous(), b.t().contiguous()))
    batch = lay_out([Segment(group, slots[owner], row, row + 1) for row, owner in enumerate(owners)])
    spans = [(owners.index(owner), owners.index(owner) + owners.count(owner), slot) for owner, slot in slots.items()]

    def loop() -> None:
        for first, last, slot in spans:
            a, b = matrices[slot]
            y[first:last].addmm_(x[first:last] @ a, b)

    runs = {
        "base": lambda: torch.nn.functional.linear(x, base),
        "ours": lambda: add_lora(y, x, weights, batch),
        "loop": loop,
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 3):
        for name in runs if turn % 2 else reversed(runs):
            spent = seconds(runs[name])
            if turn >= 3:
                taken[name].append(spent)
    shares = sorted(ours / base for ours, base in zip(taken["ours"], taken["base"], strict=True))
    gains = sorted(loop / ours for loop, ours in zip(taken["loop"], taken["ours"], strict=True))
    return {
        "microseconds": statistics.median(taken["ours"]) * 1e6,
        "share_of_base": statistics.median(shares),
        "share_low": shares[len(shares) // 4],
        "share_high": shares[3 * len(shares) // 4],
        "times_faster_than_a_loop": statistics.median(gains),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with torch.inference_mode():
        for traffic in TRAFFIC:
            for rows in (1, 8, 32):
                found = compare(traffic, rows, asked.width, asked.rank, asked.rounds)
                results += [{"name": f"{traffic}/{rows}/{name}", "value": value} for name, value in found.items()]
                print(
                    f"{traffic:10} {rows:3} rows: {found['microseconds']:7.0f} µs, "
                    f"{100 * found['share_of_base']:4.0f} % of the base's linear "
                    f"({100 * found['share_low']:.0f} to {100 * found['share_high']:.0f}), "
                    f"{found['times_faster_than_a_loop']:.1f} × a loop over adapters"
                )
    if asked.json:
        rows_of_results = [result | {"unit": "", "target": None, "holds": None} for result in results]
        print(json.dumps({"benchmark": "add_lora", "machine": platform.processor(), "results": rows_of_results}))


if __name__ == "__main__":
    main()
