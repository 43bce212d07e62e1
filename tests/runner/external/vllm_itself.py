"""vLLM in its own environment, called from a test."""

import os
import pickle
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from motet_runner.external.engine_start import source_path
from motet_runner.external.vllm.driven import Ask, Facts, Produced
from motet_runner.interface import EngineConfig
from tools.peers.environment import complete, folder, python_of
from tools.peers.vllm import VLLM

ENVIRONMENT = folder(VLLM, os.environ)


def is_built() -> bool:
    """One that somebody names, for example one for GPUs, is used as it is."""
    named = os.environ.get(VLLM.named_by)
    return python_of(ENVIRONMENT).exists() if named else complete(VLLM, ENVIRONMENT)


needs_vllm = pytest.mark.needs(is_built, "`make peer PEERS=vllm` builds an environment with vLLM")


def variables() -> dict[str, str]:
    """Of the environment of a process with vLLM. It is started without the OpenMP that vLLM likes best: that leaves a
    file in /dev/shm if its process is killed."""
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return ours | {"PYTHONPATH": os.pathsep.join(source_path())}


class VllmItself:
    """`Driven`, in another process. It may serve one test after the other."""

    def __init__(self, config: EngineConfig, *, block_tokens: int | None = None) -> None:
        """`block_tokens`: instead of what a block usually has"""
        script = Path(__file__).with_name("vllm_process.py")
        self._process = subprocess.Popen(
            [python_of(ENVIRONMENT), "-P", script, *([str(block_tokens)] if block_tokens else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables(),
        )
        self.facts: Facts = self._call("", config)

    def check(self, options: dict[str, Any]) -> None:
        self._call("check", options)

    def add(self, ask: Ask) -> None:
        self._call("add", ask)

    def allow(self, name: str, allowed: bytes) -> None:
        self._call("allow", name, allowed)

    def abort(self, names: list[str]) -> None:
        self._call("abort", names)

    def step(self) -> list[Produced]:
        return self._call("step")

    def blocks_in_use(self) -> int:
        return self._call("blocks_in_use")

    def stops(self) -> int:
        return self._call("stops")

    def load_adapter(self, number: int, folder: Path) -> None:
        self._call("load_adapter", number, folder)

    def remove_adapter(self, number: int) -> None:
        self._call("remove_adapter", number)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _call(self, method: str, *arguments: object) -> Any:
        pickle.dump((method, arguments), self._process.stdin)
        self._process.stdin.flush()
        found = pickle.load(self._process.stdout)
        if isinstance(found, Exception):
            raise found
        return found


@dataclass
class OneTest:
    """A process that many tests use, for one of them: its requests and adapters have names that no other test has."""

    itself: VllmItself
    facts: Facts
    number: int
    asked: set[str] = field(default_factory=set)
    adapters: set[int] = field(default_factory=set)

    def check(self, options: dict[str, Any]) -> None:
        self.itself.check(options)

    def add(self, ask: Ask) -> None:
        adapter = ask.adapter and self._own(ask.adapter)
        self.itself.add(ask._replace(name=self._named(ask.name), adapter=adapter, salt=self._named(ask.salt)))
        self.asked.add(ask.name)

    def allow(self, name: str, allowed: bytes) -> None:
        self.itself.allow(self._named(name), allowed)

    def abort(self, names: list[str]) -> None:
        self.itself.abort([self._named(name) for name in names])
        self.asked -= set(names)

    def step(self) -> list[Produced]:
        made = [one._replace(name=one.name.partition(" ")[2]) for one in self.itself.step()]
        self.asked -= {one.name for one in made if one.ended}
        return made

    def blocks_in_use(self) -> int:
        return self.itself.blocks_in_use()

    def stops(self) -> int:
        return self.itself.stops()

    def load_adapter(self, number: int, folder: Path) -> None:
        self.itself.load_adapter(self._own(number), folder)
        self.adapters.add(number)

    def remove_adapter(self, number: int) -> None:
        self.itself.remove_adapter(self._own(number))
        self.adapters.remove(number)

    def close(self) -> None:
        """Nothing of it is left to the next test."""
        self.abort(list(self.asked))
        for number in list(self.adapters):
            self.remove_adapter(number)

    def _named(self, name: str) -> str:
        return f"{self.number} {name}"

    def _own(self, number: int) -> int:
        return self.number * 1000 + number
