"""Which type a model on a CPU gets where nobody has set it."""

import json
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from motet_runner import cpu
from motet_runner.execute.kernels.kernel_choice import KernelChoice
from motet_runner.execute.load.checkpoint_headers import Checkpoint
from motet_runner.execute.pack.linear_packing import TorchPacking
from motet_runner.execute.tune import dtype_choice
from motet_runner.execute.tune.dtype_choice import DtypeChoice, largest_matrices, measure, preferred
from tests.runner.engines import ask, make_engine, run
from tests.runner.random_models import save_base

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Path]:
    """The same small model, saved in each type."""
    root = tmp_path_factory.mktemp("models")
    base = save_base("llama", root / "float32")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=F32)
    saved = {F32: base}
    for dtype in (BF16, torch.float16):
        saved[dtype] = root / str(dtype)
        model.to(dtype).save_pretrained(saved[dtype])
    return saved


@pytest.fixture(autouse=True)
def this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies bfloat16, and bfloat16 is faster."""
    monkeypatch.setattr(dtype_choice, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(dtype_choice, "measure", lambda _: {F32: [2.0], BF16: [1.0]})


def choice(folder: Path | None = None, kernels: str = "torch") -> DtypeChoice:
    return DtypeChoice(kernels, TorchPacking(), compiled_follow=False, folder=folder)


def reasons(logs: list) -> list[str]:
    return [line["reason"] for line in logs if line["event"] == "dtype_chosen"]


@pytest.mark.parametrize(("stored", "name"), [(F32, "F32"), (torch.float16, "F16")])
def test_only_files_in_bfloat16_are_served_in_bfloat16(
    folders: dict[torch.dtype, Path], stored: torch.dtype, name: str
) -> None:
    assert choice()(Checkpoint(folders[BF16])) is BF16
    with capture_logs() as logs:
        assert choice()(Checkpoint(folders[stored])) is F32
    assert reasons(logs) == [f"the files have {name}"]


def test_a_cpu_that_does_not_multiply_bfloat16_computes_in_float32(
    folders: dict[torch.dtype, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype_choice, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(dtype_choice, "measure", lambda _: pytest.fail("it was measured"))
    assert choice()(Checkpoint(folders[BF16])) is F32


def test_the_faster_type_is_chosen_and_kept_for_these_kernels(
    folders: dict[torch.dtype, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Checkpoint(folders[BF16])
    monkeypatch.setattr(dtype_choice, "measure", lambda _: {F32: [1.0], BF16: [1.2]})
    with capture_logs() as logs:
        assert choice(tmp_path)(files) is F32
    assert logs[0]["milliseconds"] == {"float32": 1000.0, "bfloat16": 1200.0}
    monkeypatch.setattr(dtype_choice, "measure", lambda _: {F32: [1.0], BF16: [1.0]})
    assert choice(tmp_path)(files) is F32, "it was measured before"
    assert choice(tmp_path, "cpp (any)")(files) is BF16
    assert choice()(files) is BF16, "there is no folder to keep it in"


def test_what_was_measured_on_a_busy_machine_is_measured_again(
    folders: dict[torch.dtype, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype_choice, "measure", lambda _: {F32: [1.0, 1.0, 1.0], BF16: [0.5, 3.0, 3.0]})
    assert choice(tmp_path)(Checkpoint(folders[BF16])) is F32
    assert not (tmp_path / dtype_choice.FILE).exists()


@pytest.mark.parametrize("kept", ["float16", 3, None, ["float32"]], ids=repr)
def test_a_kept_word_that_is_no_type_is_measured_again(
    folders: dict[torch.dtype, Path], tmp_path: Path, kept: object
) -> None:
    files, path = Checkpoint(folders[BF16]), tmp_path / dtype_choice.FILE
    choice(tmp_path)(files)
    entries = json.loads(path.read_text())
    path.write_text(json.dumps({key: entry | {"dtype": kept} for key, entry in entries.items()}))
    with capture_logs() as logs:
        assert choice(tmp_path)(files) is BF16
    assert "milliseconds" in logs[0]


def test_kernels_without_products_of_their_own_are_not_measured(
    folders: dict[torch.dtype, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype_choice, "measure", lambda _: pytest.fail("it was measured"))
    files = Checkpoint(folders[BF16])
    assert DtypeChoice("torch", None, compiled_follow=True, folder=None)(files) is BF16
    assert DtypeChoice("others", None, compiled_follow=False, folder=None)(files) is F32


def test_kernels_that_must_pass_a_test_first_are_not_measured() -> None:
    """Those of a GPU, in an interpreter on a CPU, which computes wrong in bfloat16"""
    choice = KernelChoice("torch", torch.device("cpu"), None)
    assert choice.packing is choice.serving.packing is not None
    choice._to_test = choice.serving  # noqa: SLF001
    assert choice.packing is None


def test_float32_must_be_worth_twice_the_memory() -> None:
    assert preferred({F32: [1.0], BF16: [1.05]}) is BF16
    assert preferred({F32: [1.0], BF16: [1.15]}) is F32
    assert preferred({F32: [1.0, 1.0, 9.0], BF16: [1.2, 1.2, 1.2]}) is F32  # one call was disturbed


def test_calls_take_turns_and_end_in_time() -> None:
    now, called = 0.0, []

    def call(dtype: torch.dtype, seconds: float) -> None:
        nonlocal now
        called.append(dtype)
        now += seconds

    calls = {F32: lambda: call(F32, 0.06), BF16: lambda: call(BF16, 0.04)}
    assert {dtype: len(taken) for dtype, taken in measure(calls, lambda: now).items()} == {F32: 3, BF16: 3}
    assert called == [F32, BF16] * 4
    slow = {F32: lambda: call(F32, 9.0), BF16: lambda: call(BF16, 1.0)}
    assert measure(slow, lambda: now) == {F32: [pytest.approx(9.0)], BF16: [pytest.approx(1.0)]}


def test_the_matrices_that_make_up_most_of_the_model_are_measured(
    folders: dict[torch.dtype, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Checkpoint(folders[BF16])
    shape, count = largest_matrices(files) or ((0, 0), 0)
    assert shape == (512, 64)  # what the model looks up, and its head
    matrices = [tensor.shape for tensor in files.tensors.values() if len(tensor.shape) == 2]
    assert count == sum(outputs * inputs for outputs, inputs in matrices) // (512 * 64)
    monkeypatch.setattr(dtype_choice, "MEASURED_NUMBERS", 1000)
    assert largest_matrices(files) == ((15, 64), 1)


@pytest.mark.parametrize(
    ("text", "multiplies"),
    [
        ("model name\t: Some CPU\nflags\t\t: fpu avx512f avx512_bf16\n\nflags\t\t: fpu\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("model name\t: avx512_bf16\nflags\t\t: fpu avx512f avx2\n", False),
        (None, False),
    ],
)
def test_the_cpu_says_what_it_multiplies(tmp_path: Path, text: str | None, multiplies: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if text is not None:
        cpuinfo.write_text(text)
    assert cpu.multiplies_bfloat16(cpuinfo) == multiplies
    assert cpu.cpu_name(cpuinfo)


@pytest.mark.parametrize("kernels", ["torch", "cpp"])
def test_an_engine_takes_it(
    folders: dict[torch.dtype, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    monkeypatch.setattr(dtype_choice, "measure", measure)  # with the products of these kernels
    monkeypatch.setattr(dtype_choice, "FILE", str(tmp_path / "dtypes.json"))
    monkeypatch.setattr(dtype_choice, "quiet", lambda _: True)
    monkeypatch.setattr(dtype_choice, "preferred", lambda _: BF16)
    engine = make_engine(folders[BF16], kernels=kernels)
    assert engine.info.dtype == "bfloat16"
    assert engine.diagnostics.loaded.model.dtype is BF16
    assert len(run(engine, ask("r", max_tokens=4)).tokens["r"]) == 4
    assert len(json.loads((tmp_path / "dtypes.json").read_text())) == 1
    assert make_engine(folders[F32], kernels=kernels).info.dtype == "float32"
    assert make_engine(folders[BF16], kernels="exact", threads=1).info.dtype == "float32"
