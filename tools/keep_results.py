"""Keep what benchmarks have printed with `--json`, for the tables of docs/performance.md.

    python -m benchmarks.engine --json | tee run.txt
    python tools/keep_results.py run.txt
    make generate

A figure is kept if somebody else can measure it again: in five pairs or more, undisturbed, from a commit without other
changes, beside an engine that gave the same, and with the settings of `benchmarks.page`. Others are refused by name,
and the tool ends with status 1. A figure without pairs explains those beside it, and is kept only if it was counted,
and no clock was read for it; goals of a GPU are measured in rounds, which `benchmarks/gpu.py` checks itself.

A new result takes the place of the older one of its name and processor, with the commit that it was measured on. What
else of the machine cannot matter to a reader is left out.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT))  # for `python tools/keep_results.py`, which finds only what is beside this file

from benchmarks.page import settings_of_parts  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
LEAST_PAIRS = 5


def keep(lines: Iterable[str], folder: Path | None = None) -> list[str]:
    """Returns why figures were refused. Other lines than those of results are skipped."""
    refused = []
    for run in runs(lines):
        kept, figures = [], [row for row in run["results"] if is_figure(row)]
        if not figures:
            refused.append(f"{run['benchmark']}: nothing was measured in pairs")
        for row in figures:
            of = row | {"commit": row.get("commit", run["commit"])} | _machine(run["machine"])
            if why := obstacle(of) or other_settings(of, run["benchmark"]):
                refused.append(f"{row['name']}: {why}")
            else:
                kept.append(of)
        if kept:
            _write((folder or RESULTS) / f"{run['benchmark']}.json", run["benchmark"], kept)
    return refused


def runs(lines: Iterable[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith('{"benchmark"')]


def is_figure(row: dict[str, Any]) -> bool:
    return bool(row.get("counted") or "goal" in row or row.get("against"))


def obstacle(row: dict[str, Any]) -> str | None:
    """Why the figure is not kept, or None."""
    if not row["commit"] or row["commit"].endswith("+"):
        return "its tree had changes that are in no commit"
    if row.get("counted") or "goal" in row:
        return None
    if row.get("same") is False:
        return "both engines gave other tokens, or none could be compared"
    pairs = row["against"]
    if pairs["pairs"] < LEAST_PAIRS:
        return f"{pairs['pairs']} of at least {LEAST_PAIRS} pairs"
    return "other processes disturbed it" if pairs["disturbed"] else None


def other_settings(row: dict[str, Any], benchmark: str) -> str | None:
    """How they differ from those of the page, or None."""
    of_parts = settings_of_parts().get(benchmark)
    if of_parts is None:
        return None
    settings = row.get("settings")
    if not settings:
        return "it does not say its settings"
    differ = [
        [f"{name} {value} for {of.get(name)}" for name, value in settings.items() if value != of.get(name)]
        for of in of_parts
    ]
    fewest = min(differ, key=len)
    return f"other settings than those of benchmarks.page: {', '.join(fewest)}" if fewest else None


def _machine(machine: dict[str, Any]) -> dict[str, Any]:
    return {what: machine[what] for what in ("processor", "cores", "gpu") if what in machine}


def _write(path: Path, benchmark: str, rows: list[dict[str, Any]]) -> None:
    before = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    of_name = {(row["name"], row["processor"]): row for row in [*before, *rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": benchmark, "results": list(of_name.values())}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("printed", type=Path, nargs="+", help="a file with what a benchmark has printed")
    printed = {one: one.read_text(encoding="utf-8").splitlines() for one in parser.parse_args().printed}
    empty = [one for one, lines in printed.items() if not runs(lines)]
    if len(empty) == len(printed):
        parser.error("no results. Run the benchmark with --json.")
    for one in empty:
        print(f"no results: {one}", file=sys.stderr)  # noqa: T201
    refused = [why for lines in printed.values() for why in keep(lines)]
    for why in refused:
        print(f"not kept: {why}", file=sys.stderr)  # noqa: T201
    sys.exit(bool(refused))


if __name__ == "__main__":
    main()
