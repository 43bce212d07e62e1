"""Dockerfiles, read as far as tests need it."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from testbed.tree import ROOT

FOLDERS = {
    "gateway": ROOT / "services" / "gateway",
    "scheduler": ROOT / "services" / "scheduler",
    "predictor": ROOT / "services" / "predictor",
    "supervisor": ROOT / "services" / "supervisor",
    "runner": ROOT / "services" / "gpu-runner",
    "operator": ROOT / "operator",
}


@dataclass
class Stage:
    base: str
    name: str = ""
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [rest for what, rest in self.instructions if what == instruction]

    def last(self, instruction: str) -> str:
        return self.all(instruction)[-1]

    @property
    def labels(self) -> dict[str, str]:
        pairs = [pair.split("=", 1) for rest in self.all("LABEL") for pair in shlex.split(rest)]
        return {name: value for name, value in pairs}  # noqa: C416 - says what the pairs are


@dataclass
class Dockerfile:
    text: str
    arguments: dict[str, str]
    stages: list[Stage]

    @property
    def final(self) -> Stage:
        return self.stages[-1]

    @property
    def entrypoint(self) -> list[str]:
        output = self.final.last("ENTRYPOINT")
        command: list[str] = json.loads(output)
        return command

    @property
    def extras(self) -> list[str]:
        """Of the wheel, as installed."""
        (found,) = re.findall(r'"\$\(ls /wheels/\*\.whl\)\[([a-z,]+)\]"', self.text)
        return str(found).split(",")


def read(folder: Path, name: str = "Dockerfile") -> Dockerfile:
    text = (folder / name).read_text()
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text))
    made = Dockerfile(text, {}, [])
    for line in filter(None, map(str.strip, joined.splitlines())):
        what, _, rest = line.partition(" ")
        match what, made.stages:
            case "FROM", _:
                base, _, name = rest.partition(" AS ")
                made.stages.append(Stage(base, name))
            case "ARG", []:
                name, _, value = rest.partition("=")
                made.arguments[name] = value
            case _:
                made.stages[-1].instructions.append((what, rest.strip()))
    return made
