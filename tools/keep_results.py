"""Keep what benchmarks have printed with `--json`, for the tables of docs/performance.md.

    python -m benchmarks.engine --json | tee run.txt
    python tools/keep_results.py run.txt
    make generate

A new result takes the place of the older one of its name in benchmarks/results, with the commit that it was measured
on. What of the machine cannot matter to a reader is left out.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
OF_MACHINE = ("processor", "cores", "memory_gib", "gpu")


def keep(lines: Iterable[str], folder: Path = RESULTS) -> list[Path]:
    """Returns the files that it wrote. Other lines than those of results are skipped."""
    written = []
    for run in runs(lines):
        path = folder / f"{run['benchmark']}.json"
        kept = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
        by_name = {row["name"]: row for row in kept}
        by_name |= {row["name"]: row | {"commit": run.get("commit", "")} for row in run["results"]}
        of_machine = {what: run["machine"][what] for what in OF_MACHINE if what in run["machine"]}
        document = {"benchmark": run["benchmark"], "machine": of_machine, "results": list(by_name.values())}
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        written.append(path)
    return written


def runs(lines: Iterable[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith('{"benchmark"')]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("printed", type=Path, nargs="+", help="a file with what a benchmark has printed")
    for one in parser.parse_args().printed:
        if not (files := keep(one.read_text(encoding="utf-8").splitlines())):
            parser.error(f"{one} has no results. Run the benchmark with --json.")
        print(*files)  # noqa: T201
