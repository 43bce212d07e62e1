"""Write the tables and plots of docs/performance.md from benchmarks/results (`make generate`).

A file there is the last line that a benchmark has printed with `--json`. The page marks where a table belongs:

    <!-- table: vllm -->
    <!-- end -->
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

sys.path.insert(0, str(ROOT))  # for `python tools/generate_performance.py`, which finds only what is beside this file

from tools.performance.goals import goals_table  # noqa: E402
from tools.performance.plot import plot_of  # noqa: E402
from tools.performance.results import read_results, read_rows  # noqa: E402
from tools.performance.tables import TABLES, missed_table, table_of  # noqa: E402

PLOTS = {
    "vllm": "Tokens per second against vLLM for CPUs",
    "keep": "What adapters leave of the base's speed",
    "op": "add_lora, 4096 to 4096, rank 16, bf16",
}

_TABLE = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def generate(docs: Path = DOCS) -> list[Path]:
    """Write the plots and the page with its tables. Returns the files."""
    measured = read_results()
    page = docs / "performance.md"
    tables = {name: table_of(table, measured) for name, table in TABLES.items()}
    tables |= {"gpu": goals_table(read_rows()), "missed": missed_table(measured)}
    text = _TABLE.sub(
        lambda found: f"{found[1]}\n{tables[found['name']]}\n\n{found[3]}",
        (DOCS / "performance.md").read_text(encoding="utf-8"),
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    written = [page]
    for name, title in PLOTS.items():
        path = docs / "images" / f"performance-{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plot_of(title, TABLES[name], measured), encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCS)
    for one in generate(parser.parse_args().out):
        print(one.name)  # noqa: T201
