"""Write crds/, and the same as templates of the chart motet-crds, from motet.resources (`make generate`).

The results are committed; tests/repo compares them with what this tool writes now. `--out DIR` writes elsewhere.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from motet.resources.crd import CUSTOM_RESOURCES, custom_resource_definition

ROOT = Path(__file__).resolve().parent.parent
CRDS = ROOT / "crds"
TEMPLATES = ROOT / "charts" / "motet-crds" / "templates"

NOTE = "# Generated from services/common/motet/resources: change that, not this file, and run `make generate`.\n"


def generate(out: Path, templates: Path) -> list[Path]:
    """Write every CRD into both folders. Returns the files."""
    written = []
    for kind in CUSTOM_RESOURCES:
        # A copy through JSON: YAML would write anchors for parts that two fields share.
        definition = json.loads(json.dumps(custom_resource_definition(kind)))
        written += [_write(out / kind.file_name, definition), _write(templates / kind.file_name, _kept(definition))]
    return written


def _kept(definition: dict[str, Any]) -> dict[str, Any]:
    """The CRD as a template of the chart. Uninstalling the chart must not delete every tenant's objects."""
    metadata = {**definition["metadata"], "annotations": {"helm.sh/resource-policy": "keep"}}
    return {**definition, "metadata": metadata}


def _write(path: Path, definition: dict[str, Any]) -> Path:
    text = yaml.safe_dump(definition, sort_keys=False, allow_unicode=True, width=120)
    if "{{" in text:
        raise ValueError(f"{path.name} contains {{{{, which Helm would read as a template")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(NOTE + text, encoding="utf-8")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a folder for both; the chart's go into its `templates`")
    out = parser.parse_args().out
    for written in generate(out or CRDS, out / "templates" if out else TEMPLATES):
        print(written)  # noqa: T201
