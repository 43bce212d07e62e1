"""Write crds/ from motet.resources (`make generate`).

The result is committed; tests/repo writes it again and compares. `--out DIR` writes elsewhere.
"""

import argparse
import json
from pathlib import Path

import yaml

from motet.resources.crd import KINDS, custom_resource_definition

ROOT = Path(__file__).resolve().parent.parent
CRDS = ROOT / "crds"

NOTE = "# Written by tools/generate_crds.py (`make generate`). Change motet.resources, not this file.\n"


def generate(out: Path) -> list[Path]:
    """Write every CRD into `out` and name the files."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in KINDS:
        # Through JSON, so that no part is shared and YAML needs no anchors.
        definition = json.loads(json.dumps(custom_resource_definition(kind)))
        path = out / kind.file_name
        path.write_text(
            NOTE + yaml.safe_dump(definition, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8"
        )
        written.append(path)
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=CRDS)
    for written in generate(parser.parse_args().out):
        print(written.name)  # noqa: T201
