"""What a fetch process does with its source, in the process of the test."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from motet.errors import AdapterFetchFailed
from motet_runner.sources import fetch_process
from motet_runner.sources.fetch_errors import missing
from motet_runner.sources.fetch_order import FetchOrder
from motet_runner.sources.fetch_process import TransferWatch
from motet_runner.sources.file_selection import WantedFile

SHARDS = 6


def an_order(into: Path, what: str = "adapter", *, stall_seconds: float = 30.0) -> FetchOrder:
    return FetchOrder(
        what=what, uri="https://acme/a/", into=str(into), max_bytes=1 << 30, stall_seconds=stall_seconds,
        min_average_bytes_per_second=1, parallel=2,
    )  # fmt: skip


class Shards:
    """A base model of which the first one is not there. The others come when the test says so."""

    revision = ""
    sizes = None

    def __init__(self, go: Callable[[], object]) -> None:
        self.begun: list[str] = []
        self._go = go

    def fetch(self, file: WantedFile, into: Path) -> bool:
        if file.name.endswith("index.json"):
            weights = {"weight_map": {str(number): f"m-{number}.safetensors" for number in range(SHARDS)}}
            (into / file.name).write_bytes(orjson.dumps(weights))
        elif file.name.endswith(".safetensors"):
            self.begun.append(file.name)
            if file.name == "m-0.safetensors":
                raise missing("m-0 answers 404")
            self._go()
        elif file.name != "config.json":
            return False
        return True


def test_after_the_first_failure_no_other_shard_is_begun_or_waited_for(tmp_path: Path) -> None:
    go = threading.Event()
    source = Shards(go.wait)
    try:
        with pytest.raises(AdapterFetchFailed, match="m-0 answers 404"):
            fetch_process.fetch_all(an_order(tmp_path, "model"), source, tmp_path, None, lambda *_: 0)
    finally:
        go.set()
    assert len(source.begun) <= 3, "at most one for each thread"


class Ended(Exception):
    pass


def test_a_part_that_is_begun_again_is_no_slow_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier fetch has left is not continued, as its server names no version of it: the folder gets smaller,
    and grows all the time afterwards."""
    part, now, said = tmp_path / "adapter_model.safetensors.part", [0.0], []
    part.write_bytes(b"x" * (1 << 20))

    def passes(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 20:
            raise Ended
        part.write_bytes(b"x" * int(now[0] * 10_000))

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", passes)
    monkeypatch.setattr(fetch_process, "send", lambda **_: None)
    monkeypatch.setattr(fetch_process, "end", lambda _, document: said.append(document))
    with pytest.raises(Ended):
        TransferWatch(an_order(tmp_path, stall_seconds=2.0)).run()
    assert said == []
