"""Which kernels an engine computes with, and when it changes over to the compiled ones."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch
from structlog.testing import capture_logs

from motet.domain import Digest
from motet.errors import SetupError
from motet_kernels import TorchBackend
from motet_kernels.cpp import CannotBuild, CppBackend
from motet_runner.engine import Engine
from motet_runner.execute.kernels import KernelChoice
from motet_runner.interface import AdapterLoaded
from motet_runner.settings import Settings
from tests.runner.engines import ask, load, make_engine, run
from tests.support.compiled_kernels import CACHE, built, needs_a_compiler

CPU = torch.device("cpu")


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """The compiler ends once this is set."""
    needs_a_compiler()
    compiled, ready = built(), Event()

    def build(*_: object) -> object:
        ready.wait()
        return compiled

    monkeypatch.setattr("motet_runner.execute.kernels.build", build)
    yield ready
    ready.set()


def finish_build(engine: Engine, ready: Event) -> None:
    ready.set()
    building = engine._kernel_choice._build
    assert building is not None
    building._thread.join()


def serving(engine: Engine) -> str:
    name = engine._kernel_choice.serving.name
    assert isinstance(engine._backend, CppBackend if name.startswith("cpp") else TorchBackend)
    return name


@pytest.mark.parametrize(("kernels", "says"), [("triton", "not yet"), ("cuda", "is unknown")])
def test_other_names_are_refused(llama: Path, kernels: str, says: str) -> None:
    with pytest.raises(SetupError, match=rf"{says}.*Choose one of auto, torch, cpp"):
        make_engine(llama, kernels=kernels)


def test_compiled_kernels_serve_from_the_start_if_they_are_asked_for(llama: Path) -> None:
    needs_a_compiler()
    with capture_logs() as logs:
        engine = make_engine(llama, kernels="cpp")
    assert serving(engine).startswith("cpp (")
    assert [entry["serving"] for entry in logs if entry["event"] == "kernels_chosen"] == [serving(engine)]
    assert (
        run(engine, ask("a"), ask("b", prompt=50)).tokens
        == run(make_engine(llama), ask("a"), ask("b", prompt=50)).tokens
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"compiler": "no-such-compiler"}, "there are no compiled kernels: there is no compiler no-such-compiler"),
        ({"kernel_cache": None}, "there is no folder"),
    ],
)
def test_without_them_such_an_engine_does_not_start(llama: Path, settings: dict, says: str) -> None:
    with pytest.raises(SetupError, match=says) as refused:
        make_engine(llama, kernels="cpp", **settings)
    assert "\n" not in refused.value.message
    assert "engine.kernels is cpp" in refused.value.message


def test_they_are_for_a_cpu() -> None:
    with pytest.raises(SetupError, match="computes on a CPU, and the device is cuda"):
        KernelChoice("cpp", torch.device("cuda"), CACHE)
    assert not KernelChoice("auto", torch.device("cuda"), CACHE).waiting, "nothing is compiled for a GPU"


def test_nothing_is_compiled_for_torch_nor_without_a_folder(llama: Path) -> None:
    for settings in ({"kernels": "torch"}, {"kernels": "auto", "kernel_cache": None}):
        engine = make_engine(llama, **settings)
        assert not engine._kernel_choice.waiting
        assert serving(engine) == "torch"


def test_the_engine_changes_over_only_while_no_sequence_lives(llama: Path, adapters: list[Path], ready: Event) -> None:
    asked = [ask("a", prompt=30), ask("b", prompt=50, adapter=Digest("x")), ask("c", adapter=Digest("x"))]
    short = ask("d", prompt=(7,), adapter=Digest("x"))  # its first batch is laid out as the last one of "c"
    torch_engine = make_engine(llama, kernels="torch")
    load(torch_engine, Digest("x"), adapters[0])
    expected = run(torch_engine, *asked).tokens
    expected_of_short = run(torch_engine, short).tokens
    with capture_logs() as logs:
        engine = make_engine(llama, kernels="auto")
        load(engine, Digest("x"), adapters[0])
        assert serving(engine) == "torch"
        ran = run(engine, asked[0], asked[1], steps=8)
        finish_build(engine, ready)
        ran = run(engine, asked[2], ran=ran, steps=5)
        assert serving(engine) == "torch", "sequences live"
        ran = run(engine, ran=ran)
        assert serving(engine) == "torch", "nobody has come since"
        assert run(engine, short).tokens == expected_of_short
        again = run(engine, *asked)
    assert serving(engine).startswith("cpp (")
    assert ran.tokens == again.tokens == expected
    assert len(ran.of(AdapterLoaded)) == 1
    assert again.of(AdapterLoaded) == [], "the adapter stays where it is"
    said = [(entry["event"], entry["serving"]) for entry in logs]
    assert said == [("kernels_chosen", "torch"), ("kernels_changed", serving(engine))]


def test_a_build_that_fails_is_told_once_and_torch_goes_on(
    llama: Path, ready: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, says in ((CannotBuild("the compiler is too old"), "too old"), (MemoryError("none left"), "none left")):

        def build(*_: object, error: Exception = error) -> object:
            ready.wait()
            raise error

        monkeypatch.setattr("motet_runner.execute.kernels.build", build)
        ready.clear()
        with capture_logs() as logs:
            engine = make_engine(llama, kernels="auto")
            finish_build(engine, ready)
            run(engine, ask("a"))
            run(engine, ask("b"))
        assert serving(engine) == "torch"
        told = [entry for entry in logs if entry["event"] == "kernels_not_compiled"]
        assert len(told) == 1
        assert says in told[0]["reason"]


def test_kernels_that_are_in_the_cache_serve_at_once() -> None:
    needs_a_compiler()
    built()
    choice = KernelChoice("auto", CPU, CACHE)
    assert choice._build is not None
    choice._build._thread.join()
    assert choice.begin().name.startswith("cpp (")
    assert not choice.waiting


def test_a_runner_hands_its_settings_to_its_engine(tmp_path: Path) -> None:
    settings = Settings(kernels="torch", kernel_cache=Path("~/kernels"), compiler="clang++")
    config = settings.engine_config(tmp_path)
    assert (config.kernels, config.kernel_cache, config.compiler) == ("torch", Path.home() / "kernels", "clang++")


def test_back_ends_that_follow_each_other_lay_adapters_out_alike() -> None:
    assert CppBackend.tile == TorchBackend.tile
