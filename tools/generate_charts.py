"""Write values.yaml of the chart and the table in its README from its values.schema.json (`make generate`).

The schema has the name, the description and the default of each value. This tool also writes the names of all settings
into it, from the page that tools/generate_docs.py writes. The results are committed; tests/repo compares them with what
the tool writes now. `--out DIR` writes elsewhere.
"""

import argparse
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "motet"
SETTINGS = ROOT / "docs" / "reference" / "settings.md"
NOTE = "# Generated from charts/motet/values.schema.json: change that, not this file, and run `make generate`.\n"
BEGIN = "<!-- Generated from charts/motet/values.schema.json: change that, not this table, and run `make generate`. -->"
END = "<!-- end of the table of values -->"
WIDTH = 120
CODE_OR_LESS_THAN = re.compile("`[^`]*`|<")
"""Markdown decodes entities in text, but not in code."""

Schema = dict[str, Any]


def schema() -> Schema:
    found: Schema = json.loads((CHART / "values.schema.json").read_text())
    settings = re.findall(r"^\| `(MOTET_\w+)`", SETTINGS.read_text(), re.MULTILINE)
    found["$defs"]["setting"]["enum"] = sorted(set(settings))
    return found


def _own(section: Schema) -> Iterator[tuple[str, Schema]]:
    """The properties without those that Helm itself adds, which have neither a default nor parts."""
    return ((name, value) for name, value in section["properties"].items() if "default" in value or is_section(value))


def is_section(value: Schema) -> bool:
    """Whether a schema describes an object with values, not a value."""
    return "properties" in value and "default" not in value


def values(section: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Every value that can be set, with its path, in the order of the schema."""
    for name, value in _own(section):
        where = (*path, name)
        if is_section(value):
            yield from values(value, where)
        else:
            yield where, value


def values_file(section: Schema, depth: int = 0) -> Iterator[str]:
    for name, value in _own(section):
        indent = "  " * depth
        yield from (f"{indent}# {line}" for line in textwrap.wrap(value["description"], WIDTH - 2 - len(indent)))
        if is_section(value):
            yield f"{indent}{name}:"
            yield from values_file(value, depth + 1)
        else:
            yield f"{indent}{name}: {_flow(value['default'])}"
        if depth == 0:
            yield ""


def table(section: Schema) -> str:
    rows = ["| value | default | meaning |", "| --- | --- | --- |"]
    for path, value in values(section):
        meaning = CODE_OR_LESS_THAN.sub(_escaped, value["description"]).replace("|", "\\|")
        rows.append(f"| `{'.'.join(path)}` | `{_flow(value['default'])}` | {meaning} |")
    return "\n".join(rows)


def _escaped(found: re.Match[str]) -> str:
    return "&lt;" if found[0] == "<" else found[0]


def _flow(value: Any) -> str:
    """The value as JSON on one line: every JSON document is YAML."""
    return json.dumps(value, ensure_ascii=False)


def generate(out: Path) -> list[Path]:
    """Write into `out`. Returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    document = schema()
    text = NOTE + "\n" + "\n".join(values_file(document)).rstrip() + "\n"
    _check_defaults(document, yaml.safe_load(text))
    (out / "values.schema.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    (out / "values.yaml").write_text(text)
    before, _, rest = (CHART / "README.md").read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    (out / "README.md").write_text(f"{before}{BEGIN}\n\n{table(document)}\n\n{END}{after}")
    return [out / name for name in ("values.schema.json", "values.yaml", "README.md")]


def _check_defaults(document: Schema, read: Any) -> None:
    """Fail unless values.yaml has the defaults of the schema."""
    for path, value in values(document):
        found = read
        for step in path:
            found = found[step]
        if found != value["default"]:
            raise ValueError(f"{'.'.join(path)} is {found!r} in values.yaml and {value['default']!r} in the schema")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=CHART)
    for written in generate(parser.parse_args().out):
        print(written.name)  # noqa: T201
