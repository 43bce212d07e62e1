"""What a runner asks of a GPU before it loads a model, and what it says when that is not there."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from structlog.testing import capture_logs

from motet.errors import SetupError
from motet_runner.execute.adapters.adapter_uploads import AdapterLoads
from motet_runner.execute.load import device
from motet_runner.execute.load.checkpoint_headers import Checkpoint
from motet_runner.execute.load.device import device_named, has_code_for
from motet_runner.execute.load.load_model import load
from motet_runner.execute.memory_budget.activations import compute_largest_iteration
from motet_runner.execute.pack.linear_packing import SideBySide
from motet_runner.memory.gpu_memory import CONTEXT_BYTES, GIB, GpuMemory
from motet_runner.memory.out_of_memory import device_has_failed, is_out_of_memory
from motet_runner.plan import AdapterLoad
from tests.runner.engines import ask, make_engine

CUDA_ERROR = "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported"


def test_each_runner_keeps_within_its_share() -> None:
    first = GpuMemory(total=80 * GIB, free=64 * GIB, held=15 * GIB)
    assert first.left(45) == 36 * GIB - 15 * GIB - CONTEXT_BYTES
    second = GpuMemory(total=80 * GIB, free=29 * GIB, held=15 * GIB)
    assert second.left(45) == first.left(45), "what the other one takes is not this one's"


def test_no_runner_counts_on_what_is_not_free() -> None:
    assert GpuMemory(total=80 * GIB, free=3 * GIB, held=15 * GIB).left(90) == 3 * GIB


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        (
            GpuMemory(total=12 * GIB, free=11 * GIB, held=0),
            r"15\.0 GiB in bfloat16, .* 12\.0 GiB the runner may take 10\.0 GiB .*: 90\).* more than 17\.5 GiB",
        ),
        (GpuMemory(total=24 * GIB, free=4 * GIB, held=0), r"the GPU's 24\.0 GiB only 4\.0 GiB are free: other"),
    ],
    ids=["a small GPU", "a full GPU"],
)
def test_a_model_that_does_not_fit_is_refused_before_it_is_read(memory: GpuMemory, says: str) -> None:
    with pytest.raises(SetupError, match=says):
        memory.check_weights(15 * GIB, 90, "bfloat16")
    memory.check_weights(2 * GIB, 90, "bfloat16")


def test_weights_are_packed_within_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = GpuMemory(total=80 * GIB, free=60 * GIB, held=20 * GIB)
    monkeypatch.setattr(GpuMemory, "of", lambda _: memory)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    assert SideBySide(torch.device("cuda"), 45).available_bytes() == memory.left(45) < 16 * GIB


def test_weights_are_counted_in_the_type_that_they_get(llama: Path) -> None:
    model = load(llama, "float32", "cpu").model
    stored = {name: tensor for name, tensor in model.state_dict().items() if name in Checkpoint(llama).tensors}
    assert Checkpoint(llama).bytes_as(torch.float32) == 4 * sum(tensor.numel() for tensor in stored.values())
    assert Checkpoint(llama).bytes_as(torch.bfloat16) * 2 == Checkpoint(llama).bytes_as(torch.float32)


@pytest.mark.parametrize(
    ("capability", "architectures", "usable"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((9, 0), ["sm_90a"], True),
        ((6, 1), ["sm_75", "sm_80"], False),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_90", "sm_100"], False),
    ],
)
def test_which_cards_a_torch_has_code_for(
    capability: tuple[int, int], architectures: list[str], *, usable: bool
) -> None:
    assert has_code_for(capability, architectures) == usable


@pytest.mark.usefixtures("no_gpu")
def test_without_a_usable_gpu_the_reason_is_said() -> None:
    with pytest.raises(SetupError, match=r"engine\.device is cuda and no CUDA device is visible \(.*driver.* too old"):
        device_named("cuda")
    with capture_logs() as logs:
        assert device_named("auto").type == "cpu"
    assert [entry["event"] for entry in logs] == ["gpu_not_usable"], "a GPU is there, so people expect it to compute"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a GPU whose driver is too old."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(device, "_A_GPU", tmp_path / "nvidia0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    error = RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it.")
    monkeypatch.setattr("torch.cuda.init", Mock(side_effect=error))


def test_a_device_is_named_by_its_kind() -> None:
    with pytest.raises(SetupError, match=r"engine\.device 'cuda:1' is unknown.* CUDA_VISIBLE_DEVICES"):
        device_named("cuda:1")


def test_errors_of_memory_are_not_failures_of_the_device() -> None:
    assert device_has_failed(torch.AcceleratorError(CUDA_ERROR))
    assert not device_has_failed(torch.AcceleratorError("CUDA error: out of memory"))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not device_has_failed(RuntimeError("shapes do not fit"))


def test_a_device_that_fails_ends_the_engine_with_a_clear_line(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(llama)
    engine.add(ask("a"))
    monkeypatch.setattr(
        engine.diagnostics.loaded.model, "forward", Mock(side_effect=torch.AcceleratorError(CUDA_ERROR))
    )
    engine.diagnostics.loaded.fused = None
    with capture_logs() as logs, pytest.raises(torch.AcceleratorError):
        engine.step()
    assert [entry["reason"] for entry in logs if entry["event"] == "device_failed"] == [
        "CUDA error: unspecified launch failure"
    ]


def test_an_adapter_is_not_to_blame_for_a_device_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run_layout = SimpleNamespace(bytes=64)
    loads = AdapterLoads(torch.zeros(4, 64, dtype=torch.uint8), lambda _: run_layout, clock=lambda: 0.0)
    host = SimpleNamespace(allow=Mock(side_effect=torch.AcceleratorError(CUDA_ERROR)))
    monkeypatch.setattr("motet_runner.execute.adapters.adapter_uploads.HostLoad", lambda *_, **__: host)
    load = AdapterLoad(1, "digest", SimpleNamespace(rank=8, slab=""))
    with pytest.raises(torch.AcceleratorError):
        loads.advance([load], {1: 0}, hurry=False)


def test_the_largest_iteration_has_a_prompt_beside_decodes(llama: Path) -> None:
    loaded = load(llama, "float32", "cpu")
    assert compute_largest_iteration(loaded, 40, 5).shape == (6, loaded.vocabulary)
    assert compute_largest_iteration(loaded, 0, 2).shape == (3, loaded.vocabulary)
