"""Adapters of several workers, with queues of answers as vLLM's executor has them: the answers of one call stay in
order, whatever some workers make of it."""

import importlib
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from safetensors import SafetensorError

from motet.errors import AdapterIncompatible, MotetError, Overloaded
from motet_runner.external.vllm.adapter_loads import AdapterLoads
from motet_runner.external.vllm.driven import AnswersLost
from motet_runner.external.vllm.trial import Trial
from motet_runner.external.vllm.worker_extension import EndsWithTheEngine
from motet_runner.plan import AdapterLoad
from tests.runner.external.test_trial import LINEARS, Tried

MODULE = "motet_runner.external.vllm.surface"
MOCKED = (
    "vllm", "vllm.inputs", "vllm.inputs.engine", "vllm.lora", "vllm.lora.request", "vllm.platforms",
    "vllm.sampling_params", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.llm_engine", "vllm.version",
)  # fmt: skip
ERRORS: dict[str, Exception] = {
    "bad": ValueError("expected target modules in"),
    "full": OSError(28, "No space left on device", "/var/x"),
    "cut": SafetensorError("header too large"),
    "memory": RuntimeError("CUDA out of memory. Tried to allocate 9 GiB"),
}


class FakeWorker(EndsWithTheEngine):
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.adapters: set[int] = set()
        self.answers: deque[tuple[bool, Any]] = deque()

    def add_lora(self, request: Any) -> bool:
        if self.fails and (error := ERRORS.get(Path(request.lora_path).name)) is not None:
            raise error
        self.adapters.add(request.lora_int_id)
        return True

    def remove_lora(self, number: int) -> bool:
        was = number in self.adapters
        self.adapters.discard(number)
        return was


class FakeExecutor:
    """It stops to read at the first worker that failed, as MultiprocExecutor.collective_rpc does."""

    def __init__(self, *fails: bool) -> None:
        self.workers = [FakeWorker(one) for one in fails]

    def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        for worker in self.workers:
            try:
                worker.answers.append((True, getattr(worker, method)(*args)))
            except Exception as error:
                worker.answers.append((False, str(error)))
        found = []
        for worker in self.workers:
            well, answer = worker.answers.popleft()
            if not well:
                raise RuntimeError(f"Worker failed with error '{answer}', please check the stack trace above for the")
            found.append(answer)
        return found

    def add_lora(self, request: Any) -> bool:
        return all(self.collective_rpc("add_lora", args=(request,)))

    def remove_lora(self, number: int) -> bool:
        return all(self.collective_rpc("remove_lora", args=(number,)))

    @property
    def unread(self) -> int:
        return sum(len(worker.answers) for worker in self.workers)


@pytest.fixture
def surface_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in MOCKED:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    sys.modules["vllm.version"].__version__ = "0"  # type: ignore[attr-defined]
    sys.modules["vllm.lora.request"].LoRARequest = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def driving(module: Any, executor: FakeExecutor) -> Any:
    """A surface without its engine's start"""
    made = object.__new__(module.Surface)
    made._engine, made._adapters = executor, {}
    if hasattr(module, "WorkerAdapters"):
        made._workers = module.WorkerAdapters(made._ask_workers)
    return made


@pytest.mark.parametrize("fails", [(True, True), (True, False), (False, True)])
def test_adapters_that_workers_refuse_do_not_shift_the_answers_of_others(
    surface_module: Any, fails: tuple[bool, bool]
) -> None:
    executor = FakeExecutor(*fails)
    surface = driving(surface_module, executor)
    outcomes = []
    for number, name in enumerate(("good", "bad", "good", "bad", "bad", "good"), 1):
        try:
            surface.load_adapter(number, Path(name))
            outcomes.append("served")
        except ValueError as error:
            outcomes.append(str(error))
        assert not executor.unread
    refused = str(ERRORS["bad"])
    assert outcomes == ["served", refused, "served", refused, refused, "served"]
    surface.remove_adapter(1)
    assert [worker.adapters for worker in executor.workers] == [{3, 6}, {3, 6}]
    assert not executor.unread


@pytest.mark.parametrize(
    ("name", "kind"),
    [("bad", AdapterIncompatible), ("full", Overloaded), ("cut", Overloaded), ("memory", Overloaded)],
)
def test_only_what_concerns_the_adapter_condemns_it(surface_module: Any, name: str, kind: type[MotetError]) -> None:
    surface = driving(surface_module, FakeExecutor(False, True))
    (error,) = [one.error for one in failed(surface, Path(name))]
    assert type(error) is kind
    assert "Worker failed" not in str(error)


def failed(surface: Any, folder: Path) -> list[Any]:
    """What becomes of a load whose folder is written"""
    loads = AdapterLoads(surface, lambda: 0.0)
    written = SimpleNamespace(
        load=AdapterLoad.__new__(AdapterLoad), folder=Folder(folder), ended=SimpleNamespace(wait=lambda _: True),
        error=None, read=0, seen=0, began=0.0,
    )  # fmt: skip
    loads._loading[7] = written  # type: ignore[assignment]  # noqa: SLF001
    _, found = loads.advance([], {7: 0}, hurry=True)
    return found


class Folder:
    def __init__(self, path: Path) -> None:
        self.name = str(path)

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None: ...


def test_when_a_worker_does_not_answer_the_process_ends(surface_module: Any) -> None:
    executor = FakeExecutor(False, False)
    executor.workers[1].motet_add_lora = None  # type: ignore[assignment] - vLLM cannot call it
    with pytest.raises(AnswersLost, match="not all answered: 'NoneType' object is not callable"):
        failed(driving(surface_module, executor), Path("good"))


def test_an_adapter_that_a_worker_keeps_ends_the_process(surface_module: Any) -> None:
    executor = FakeExecutor(False, False)
    surface = driving(surface_module, executor)
    surface.load_adapter(1, Path("good"))
    executor.workers[0].remove_lora = MagicMock(side_effect=KeyError("slot"))  # type: ignore[method-assign]
    with pytest.raises(AnswersLost, match="cannot remove an adapter: 'slot'"):
        surface.remove_adapter(1)


class Lost(Tried):
    def load_adapter(self, number: int, folder: Path) -> None:
        raise AnswersLost("vLLM's workers have not all answered")


def test_a_trial_goes_on_with_no_kind_after_answers_are_lost() -> None:
    with pytest.raises(AnswersLost):
        Trial(Lost(), LINEARS, 16).run()
