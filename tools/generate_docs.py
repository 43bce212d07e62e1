"""Write docs/reference from the code (`make generate`): API, settings, metrics, errors, manifest fields, CRDs.

It fails for everything that is defined without a docstring or a description. The results are committed; tests/repo
compares them with what this tool writes now. `--out DIR` writes elsewhere.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"

sys.path.insert(0, str(ROOT))  # for `python tools/generate_docs.py`, which finds only what is beside this file

from tools.reference.api_page import api_page  # noqa: E402
from tools.reference.clients_page import clients_page  # noqa: E402
from tools.reference.errors_page import errors_page  # noqa: E402
from tools.reference.metrics_page import metrics_page  # noqa: E402
from tools.reference.parameters_page import parameters_page  # noqa: E402
from tools.reference.resource_pages import conditions_page, crds_page, manifests_page  # noqa: E402
from tools.reference.settings_page import settings_page  # noqa: E402

PAGES = {
    "api.md": api_page,
    "parameters.md": parameters_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "errors.md": errors_page,
    "manifests.md": manifests_page,
    "crds.md": crds_page,
    "conditions.md": conditions_page,
    "compatibility.md": clients_page,
}


def generate(out: Path) -> list[Path]:
    """Write every page into `out`. Returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, page in PAGES.items():
        path = out / name
        path.write_text(page(), encoding="utf-8")
        written.append(path)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=REFERENCE)
    for written in generate(parser.parse_args().out):
        print(written.name)  # noqa: T201
