"""Which kernels an engine computes with, and when it changes over to the compiled ones."""

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
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
from motet_runner.execute.forward.fused import TorchForward
from motet_runner.execute.kernels.kernel_change import BUILD_CHECK_SECONDS
from motet_runner.execute.kernels.kernel_choice import KernelChoice
from motet_runner.execute.pack import linear_packing as packed
from motet_runner.execute.tune import thread_choice
from motet_runner.interface import AdapterEvicted, AdapterLoaded
from motet_runner.settings import Settings
from testbed.compiled_kernels import CACHE, built, needs_a_compiler
from tests.runner.engines import ask, load, make_engine, run
from tests.runner.random_models import EIGHT, save_adapter, save_base

pytestmark = pytest.mark.usefixtures("judged_each_time")

CPU = torch.device("cpu")


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """The compiler ends once this is set."""
    needs_a_compiler()
    compiled, ready = built(), Event()

    def build(*_: object) -> object:
        ready.wait()
        return compiled

    monkeypatch.setattr("motet_runner.execute.kernels.kernel_choice.build", build)
    yield ready
    ready.set()


def finish_build(engine: Engine, ready: Event) -> None:
    ready.set()
    if (building := engine.diagnostics.kernel_choice._build) is not None:  # noqa: SLF001
        building.exception()  # waits for its end


def serving(engine: Engine) -> str:
    name = engine.diagnostics.kernel_choice.serving.name
    assert isinstance(engine.diagnostics.backend, CppBackend if name.startswith("cpp") else TorchBackend)
    return name


@pytest.mark.parametrize(("kernels", "says"), [("cuda", "is unknown"), ("Triton", "is unknown")])
def test_other_names_are_refused(llama: Path, kernels: str, says: str) -> None:
    with pytest.raises(SetupError, match=rf"{says}.*Choose one of auto, torch, cpp, triton, exact"):
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


def test_the_log_says_that_a_damaged_library_was_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_a_compiler()
    again = replace(built(), damaged="avx2.so: its bytes are not those that were written")
    monkeypatch.setattr("motet_runner.execute.kernels.kernel_choice.build", lambda *_: again)
    with capture_logs() as logs:
        KernelChoice("cpp", CPU, CACHE)
    assert [line["damaged"] for line in logs if line["event"] == "kernels_made_again"] == [again.damaged]


def test_the_log_says_why_faster_kernels_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_a_compiler()
    slower = replace(built(), skipped="amx-bf16: linear is off by 3")
    monkeypatch.setattr("motet_runner.execute.kernels.kernel_choice.build", lambda *_: slower)
    with capture_logs() as logs:
        KernelChoice("cpp", CPU, CACHE)
    assert [line["reasons"] for line in logs if line["event"] == "faster_kernels_skipped"] == [slower.skipped]


def test_the_log_says_why_each_start_tests_the_kernels_again(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_a_compiler()
    unmarked = replace(built(), unmarked="Read-only file system")
    monkeypatch.setattr("motet_runner.execute.kernels.kernel_choice.build", lambda *_: unmarked)
    with capture_logs() as logs:
        KernelChoice("cpp", CPU, CACHE)
    assert [line["reason"] for line in logs if line["event"] == "kernels_tested_at_each_start"] == [unmarked.unmarked]


def test_they_are_for_a_cpu() -> None:
    with pytest.raises(SetupError, match="computes on a CPU, and the device is cuda"):
        KernelChoice("cpp", torch.device("cuda"), CACHE)
    assert not KernelChoice("auto", torch.device("cuda"), CACHE).waiting, "nothing is compiled for a GPU"


@pytest.mark.parametrize(
    ("triton", "says"),
    [(True, "they compute on a GPU, and the device is cpu"), (False, "Triton is not installed. Install motet")],
)
def test_those_of_a_gpu_are_refused_where_they_cannot_compute(
    triton: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_runner.execute.kernels.kernel_choice.triton_is_here", lambda: triton)
    with pytest.raises(SetupError, match=f"engine.kernels is triton, and its kernels cannot serve: {says}") as refused:
        KernelChoice("triton", CPU, CACHE)
    assert "\n" not in refused.value.message


def test_on_a_gpu_the_kernels_in_triton_serve_if_they_pass_their_test(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for named in ("auto", "triton"):
        assert KernelChoice(named, gpu, CACHE).begin(lambda _: "").name == "triton"
    with capture_logs() as logs:
        choice = KernelChoice("auto", gpu, CACHE)
        assert choice.begin(lambda _: "attention gives other logits").name == "torch"
        choice.began(choice.serving, "")
    reason = "their test on this model failed: attention gives other logits"
    assert [line["reason"] for line in logs if line["event"] == "gpu_kernels_do_not_serve"] == [reason]
    assert (choice.state.serving, choice.state.note) == ("torch", f"the GPU's kernels do not serve: {reason}")
    with pytest.raises(SetupError, match=f"cannot serve: {reason}. Or use auto."):
        KernelChoice("triton", gpu, CACHE).begin(lambda _: "attention gives other logits")
    monkeypatch.setattr("motet_runner.execute.kernels.kernel_choice.triton_is_here", lambda: False)
    choice = KernelChoice("auto", gpu, CACHE)
    assert choice.begin(lambda _: "").name == "torch"
    assert "Triton is not installed" in choice.state.note


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kernels": "torch"}, "only the kernels triton compute with, and engine.kernels is torch. Change one of them"),
        ({"kernels": "exact"}, "only the kernels triton compute with, and engine.kernels is exact"),
        ({"kernels": "auto"}, "whose kernels cannot serve: they compute on a GPU, and the device is cpu. Or use auto"),
        ({"adapter_dtype": "int4"}, "is unknown. Choose one of auto, int8."),
    ],
)
def test_adapters_of_integers_are_refused_where_nothing_computes_with_them(
    llama: Path, settings: dict, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_runner.execute.kernels.kernel_choice.triton_is_here", lambda: True)
    with pytest.raises(SetupError, match=rf"engine\.adapter_dtype .*{says}") as refused:
        make_engine(llama, device="cpu", **{"adapter_dtype": "int8"} | settings)
    assert "\n" not in refused.value.message


def test_an_engine_serves_where_there_is_no_triton(llama: Path) -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from pathlib import Path\n"
        "from motet_runner.engine_process import load_engine\n"
        "from motet_runner.interface import EngineConfig\n"
        f"config = EngineConfig(model=Path({str(llama)!r}), device='cpu', kv_cache_mib=4)\n"
        "print(load_engine(config, lambda *_: None).info.kernels.serving)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "torch"


def test_nothing_is_compiled_for_torch_nor_without_a_folder(llama: Path) -> None:
    for settings in ({"kernels": "torch"}, {"kernels": "auto", "kernel_cache": None}):
        engine = make_engine(llama, **settings)
        assert not engine.diagnostics.kernel_choice.waiting
        assert serving(engine) == "torch"


def change_over(engine: Engine, ready: Event) -> int:
    """Let the compiler end, and the engine take its kernels while nothing is asked of it. → in how many parts"""
    finish_build(engine, ready)
    parts = 0
    while engine.idle() is not None:
        parts += 1
        assert parts < 1000
    return parts


def packed_linears(engine: Engine) -> int:
    return sum(not linear.weight.numel() for linear in engine.diagnostics.loaded.linears.values())


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
        assert engine.idle() == BUILD_CHECK_SECONDS, "it asks again for what is built"
        ran = run(engine, asked[0], asked[1], steps=8)
        finish_build(engine, ready)
        assert engine.idle() is None, "sequences live"
        ran = run(engine, asked[2], ran=ran, steps=5)
        assert packed_linears(engine) == 0, "sequences live"
        ran = run(engine, ran=ran)
        assert serving(engine) == "torch"
        assert change_over(engine, ready) > 3
        assert run(engine, short).tokens == expected_of_short
        again = run(engine, *asked)
    assert serving(engine).startswith("cpp (")
    assert ran.tokens == again.tokens == expected
    assert len(ran.of(AdapterLoaded)) == 1
    assert again.of(AdapterLoaded) == [], "the adapter stays where it is"
    said = [(entry["event"], entry["serving"]) for entry in logs if "serving" in entry]
    assert said == [("kernels_chosen", "torch"), ("kernels_changed", serving(engine))]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_requests_in_the_middle_of_the_change_get_their_answers(
    family: str, tmp_path: Path, ready: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two parts, on torch's kernels with some of the weights packed."""
    monkeypatch.setattr("motet_kernels.cpp.linear.PART_BYTES", 64 << 10)
    base = save_base(family, tmp_path / "base")
    adapter = save_adapter(base, family, EIGHT[0], tmp_path / "x", seed=1)
    asked = [ask("a", prompt=30, max_tokens=3), ask("b", prompt=20, max_tokens=3, adapter=Digest("x"))]
    torch_engine = make_engine(base, kernels="torch")
    load(torch_engine, Digest("x"), adapter)
    expected = run(torch_engine, *asked).tokens
    engine = make_engine(base, kernels="auto")
    load(engine, Digest("x"), adapter)
    finish_build(engine, ready)
    seen = set()
    while engine.idle() is not None:
        seen.add((serving(engine), packed_linears(engine)))
        for number, sequence in enumerate(asked):
            parts = engine.diagnostics.kernel_change._parts  # noqa: SLF001
            engine.diagnostics.planner.commands.add(sequence)  # `add` would compute a part, too
            ran = run(engine)
            assert engine.diagnostics.kernel_change._parts is parts  # noqa: SLF001
            assert ran.tokens == {sequence.request: expected[sequence.request]}, number
    assert len(seen) > 5
    assert serving(engine).startswith("cpp (")
    assert run(engine, *asked).tokens == expected


def test_requests_that_follow_each_other_at_once_do_not_stop_the_change(llama: Path, ready: Event) -> None:
    engine = make_engine(llama, kernels="auto")
    finish_build(engine, ready)
    for _ in range(200):
        run(engine, ask("a", max_tokens=1))
    assert serving(engine).startswith("cpp (")


@pytest.mark.parametrize("how", ["auto, too little is left", "auto, an allocation fails", "cpp, too little is left"])
def test_where_memory_is_short_the_linears_that_are_left_stay_in_torch(
    how: str, llama: Path, adapters: list[Path], ready: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, _, what = how.partition(", ")
    asked = [ask("a", prompt=30), ask("b", prompt=50, adapter=Digest("x"))]
    torch_engine = make_engine(llama, kernels="torch")
    load(torch_engine, Digest("x"), adapters[0])
    expected = run(torch_engine, *asked).tokens
    calls = 0

    def fails_later(value: int, error: Exception | None) -> int:
        nonlocal calls
        calls += 1
        if calls > 3 and error is not None:
            raise error
        return value if calls <= 3 else 0

    if what == "too little is left":
        monkeypatch.setattr(packed, "available_host_bytes", lambda: fails_later(1 << 40, None))
        says = "needed for a moment, and 0 MiB are left"
    else:
        says = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 16 bytes."
        make, error = packed.PackedWeights, RuntimeError(says + "\nand more")
        monkeypatch.setattr(packed, "PackedWeights", lambda *a, **k: (fails_later(0, error), make(*a, **k))[1])
    with capture_logs() as logs:
        if kernels == "cpp":
            ready.set()
        engine = make_engine(llama, kernels=kernels)
        load(engine, Digest("x"), adapters[0])
        if kernels == "auto":
            change_over(engine, ready)
        assert run(engine, *asked).tokens == expected
        assert run(engine, *asked).tokens == expected
    assert calls == 4, "it is not tried again"
    assert serving(engine).startswith("cpp (")
    assert 0 < packed_linears(engine) < len(engine.diagnostics.loaded.linears)
    assert engine.diagnostics.loaded.fused is None
    (told,) = [entry for entry in logs if entry["event"] == "weights_not_packed"]
    assert says in told["reason"]
    assert told["linears"] == len(engine.diagnostics.loaded.linears) - packed_linears(engine)
    assert "\n" not in told["reason"]
    state = engine.report().kernels
    assert state.note == f"some weights are not packed: {told['reason']}"


def test_a_change_that_fails_ends_no_engine(llama: Path, ready: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(make_engine(llama, kernels="torch"), ask("a", prompt=30)).tokens

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    with capture_logs() as logs:
        engine = make_engine(llama, kernels="auto")
        monkeypatch.setattr("motet_runner.engine.copy_bytes_of", fail)
        change_over(engine, ready)
        assert run(engine, ask("a", prompt=30)).tokens == expected
        assert engine.idle() is None
    assert serving(engine) == "torch"
    (told,) = [entry for entry in logs if entry["event"] == "kernels_not_changed"]
    assert told["reason"] == "RuntimeError: broken"
    state = engine.report().kernels
    assert (state.serving, state.note) == ("torch", "the compiled kernels do not serve: RuntimeError: broken")


def test_kernels_whose_measurement_fails_serve_all_the_same(
    llama: Path, ready: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("motet_runner.engine.choose_threads", fail)
    with capture_logs() as logs:
        engine = make_engine(llama, kernels="auto")
        change_over(engine, ready)
    assert serving(engine).startswith("cpp (")
    about_kernels = [entry["event"] for entry in logs if entry["event"].startswith("kernels_")]
    assert about_kernels == ["kernels_chosen", "kernels_changed", "kernels_not_tuned"]
    assert engine.report().kernels.note == ""


def test_requests_may_come_while_threads_are_measured(
    llama: Path, tmp_path: Path, ready: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(thread_choice, "usable_cores", lambda: 2)
    monkeypatch.setattr(thread_choice, "fastest", lambda _: 2)
    monkeypatch.setattr(thread_choice, "FILE", str(tmp_path / "threads.json"))
    try:
        engine = make_engine(llama, kernels="auto")
        expected = run(engine, ask("a", max_tokens=3)).tokens
        finish_build(engine, ready)
        between = 0
        while engine.idle() is not None:
            if serving(engine) != "torch":
                between += 1
                assert torch.get_num_threads() == 1
                engine.diagnostics.planner.commands.add(ask("a", max_tokens=3))
                assert run(engine).tokens == expected
        assert between > 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_report_says_which_kernels_serve_and_since_when(llama: Path, ready: Event) -> None:
    began = time.time()
    engine = make_engine(llama, kernels="auto")
    first = engine.report().kernels
    assert (first.serving, first.note) == ("torch", "the compiled kernels are being built")
    finish_build(engine, ready)
    engine.idle()
    middle = engine.report().kernels
    assert (middle.serving, middle.note) == ("torch", "the compiled kernels are tested, and serve soon")
    change_over(engine, ready)
    last = engine.report().kernels
    assert (last.serving, last.note) == (serving(engine), "")
    assert began <= first.since == middle.since < last.since <= time.time()


def test_a_build_that_fails_is_told_once_and_torch_goes_on_with_packed_weights(
    llama: Path, ready: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, says in ((CannotBuild("the compiler is too old"), "too old"), (MemoryError("none left"), "none left")):

        def build(*_: object, error: Exception = error) -> object:
            ready.wait()
            raise error

        monkeypatch.setattr("motet_runner.execute.kernels.kernel_choice.build", build)
        ready.clear()
        with capture_logs() as logs:
            engine = make_engine(llama, kernels="auto")
            before = run(engine, ask("a")).tokens
            assert packed_linears(engine) == 0, "the compiled kernels may still come"
            change_over(engine, ready)
            assert run(engine, ask("a")).tokens == before
            assert engine.idle() is None
        assert serving(engine) == "torch"
        assert packed_linears(engine) == len(engine.diagnostics.loaded.linears)
        assert isinstance(engine.diagnostics.loaded.fused, TorchForward)
        told = [entry for entry in logs if entry["event"] == "kernels_not_compiled"]
        assert len(told) == 1
        assert says in told[0]["reason"]
        note = engine.report().kernels.note
        assert note.startswith(f"there are no compiled kernels: {told[0]['reason']} (MOTET_RUNNER_COMPILER names ")
        assert "\n" not in note


def test_more_adapters_than_the_device_may_hold_take_turns_with_the_same_answers(
    llama: Path, adapters: list[Path]
) -> None:
    needs_a_compiler()
    answers = []
    for kernels, resident in (("torch", 16), ("cpp", 1)):
        engine = make_engine(llama, kernels=kernels, max_resident_adapters=resident)
        for number, folder in enumerate(adapters):
            load(engine, Digest(f"sha256:{number}"), folder)
        asked = [
            ask(f"r{number}", max_tokens=12, adapter=Digest(f"sha256:{number % len(adapters)}")) for number in range(6)
        ]
        ran = run(engine, *asked)
        answers.append(ran.tokens)
    assert len(ran.of(AdapterLoaded)) >= len(adapters) > 1
    assert ran.of(AdapterEvicted)
    assert answers[0] == answers[1]


def test_kernels_that_are_in_the_cache_serve_at_once() -> None:
    needs_a_compiler()
    built()
    choice = KernelChoice("auto", CPU, CACHE)
    assert choice._build is not None  # noqa: SLF001
    choice._build.exception()  # noqa: SLF001
    assert choice.begin(lambda _: "").name.startswith("cpp (")
    assert not choice.waiting


def test_a_runner_hands_its_settings_to_its_engine(tmp_path: Path) -> None:
    settings = Settings(kernels="torch", kernel_cache=Path("~/kernels"), compiler="clang++", adapter_dtype="int8")
    config = settings.engine_config(tmp_path)
    assert config.adapter_dtype == "int8"
    assert (config.kernels, config.kernel_cache, config.compiler) == ("torch", Path.home() / "kernels", "clang++")


def test_back_ends_that_follow_each_other_lay_adapters_out_alike() -> None:
    assert CppBackend.tile == TorchBackend.tile
