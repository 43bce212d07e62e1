"""Gives adapters to vLLM: a thread writes each as a plain folder, and vLLM reads it between two iterations."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError

from motet.clock import Clock
from motet.domain import BASE, Digest
from motet.errors import AdapterIncompatible, MotetError, Overloaded
from motet_runner.external.vllm.driven import AnswersLost, Driven
from motet_runner.external.vllm.plain_adapter import write_adapter
from motet_runner.external.vllm.reason import in_temporary_folder, lacks_memory, reason_of
from motet_runner.external.vllm.temporary_folders import temporary_folder
from motet_runner.plan import AdapterLoad, LoadArrived, LoadFailed

HURRY_SECONDS = 0.01
"""How long an iteration without work waits for a folder that is being written. Commands wait equally long."""


@dataclass(slots=True)
class AdapterLoads:
    driven: Driven
    clock: Clock
    parts: int = 0
    """How often more of an adapter had been read"""
    _loading: dict[int, "_Writing"] = field(default_factory=dict)
    _numbers: dict[Digest, int] = field(default_factory=dict)
    """By adapter that vLLM has"""
    _last_number: int = 0

    def number_of(self, digest: Digest) -> int:
        return 0 if digest == BASE else self._numbers[digest]

    def forget(self, gone: Iterable[Digest]) -> None:
        """No row uses these adapters any more."""
        for digest in gone:
            if (number := self._numbers.pop(digest, None)) is not None:
                self.driven.remove_adapter(number)

    def advance(
        self, begin: Iterable[AdapterLoad], loading: Mapping[int, int], *, hurry: bool
    ) -> tuple[list[LoadArrived], list[LoadFailed]]:
        """Begin loads, and let vLLM read at most one adapter that is written. `loading`: the loads that go on, by their
        numbers; all others are given up."""
        failed = []
        for load in begin:
            try:
                self._loading[load.number] = _Writing(load, self.clock())
            except (OSError, Overloaded) as error:  # no folder, or no thread
                failed.append(LoadFailed(load.number, _as_motet_error(error)))
        for number in self._loading.keys() - loading.keys():
            self._loading.pop(number).give_up()
        for number, writing in self._loading.items():
            ended = writing.ended.wait(HURRY_SECONDS if hurry else 0.0)
            self.parts += writing.read > writing.seen
            writing.seen = writing.read
            if not ended:
                continue
            del self._loading[number]
            began = self.clock()
            try:
                self._read(writing)
            except AnswersLost:
                raise
            except Exception as error:  # vLLM raises many things, and each concerns this adapter alone
                return [], [*failed, LoadFailed(number, _as_motet_error(error))]
            now = self.clock()
            return [LoadArrived(number, now - writing.began, 0.0 if hurry else now - began)], failed
        return [], failed

    def _read(self, writing: "_Writing") -> None:
        with writing.folder:
            if writing.error is not None:
                raise writing.error
            # An id that came twice could mean KV that vLLM has computed with another adapter.
            self._last_number += 1
            self.driven.load_adapter(self._last_number, Path(writing.folder.name))
        self._numbers[writing.load.digest] = self._last_number


class _Writing:
    def __init__(self, load: AdapterLoad, began: float) -> None:
        self.load = load
        self.began = began
        self.folder = temporary_folder()
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.given_up = False
        self.read = self.seen = 0
        """How many linears the thread has read, and how many of them were counted"""
        try:
            threading.Thread(target=self._write, name="adapter-load", daemon=True).start()
        except RuntimeError as error:  # there are as many as may be
            self.folder.cleanup()
            raise Overloaded(f"The runner could not load the adapter: {error}") from error

    def _write(self) -> None:
        try:
            write_adapter(self.load.layout, Path(self.folder.name), self._note_read)
        except Exception as error:  # raised where the folder is read
            self.error = error
        self.ended.set()
        if self.given_up:
            self.folder.cleanup()

    def give_up(self) -> None:
        """Nobody will read the folder: whoever comes second of its writer and this call removes it."""
        self.given_up = True
        if self.ended.is_set():
            self.folder.cleanup()

    def _note_read(self) -> None:
        self.read += 1


def _as_motet_error(error: Exception) -> MotetError:
    if isinstance(error, MotetError):
        return error
    if lacks_memory(error):
        return Overloaded(f"The runner lacks memory to load the adapter: {reason_of(error)}")
    if isinstance(error, OSError | SafetensorError):
        way = " by way of the folder for temporary files (TMPDIR)" if in_temporary_folder(error, unnamed=True) else ""
        return Overloaded(f"The runner could not load the adapter{way}: {reason_of(error)}")
    return AdapterIncompatible(f"vLLM does not take this adapter: {reason_of(error)}")
