"""What clients did when they were tried last."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Tried:
    version: str
    actions: dict[str, str]
    """Action → why it does not work, or nothing if it does"""
    missing: str
    """Why the client could not be installed, or nothing"""


def read_results(path: Path = RESULTS) -> dict[str, Tried]:
    return {name: Tried(**one) for name, one in json.loads(path.read_text(encoding="utf-8")).items()}


def write_results(results: Mapping[str, Tried], path: Path = RESULTS) -> None:
    path.write_text(json.dumps({name: asdict(one) for name, one in results.items()}, indent=2) + "\n", encoding="utf-8")
