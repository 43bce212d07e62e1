"""Mistral, with a window that is shorter than prompts, and with adapters of 8-bit integers, through an engine on the
GPU's kernels: it computes what PEFT computes with adapters that were rounded so before, and they take less memory."""

from pathlib import Path

import pytest

from motet_kernels.gpu.lora_tiles import RANK_STEP
from motet_runner.execute.forward.gpu import GpuForward
from tests.gpu.served_family import serve_as_peft

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def test_an_engine_equals_peft_with_rounded_adapters(tmp_path: Path) -> None:
    engine = serve_as_peft("Mistral, sliding window", tmp_path, "int8").engine
    assert isinstance(engine.diagnostics.loaded.fused, GpuForward)
    linears = engine.diagnostics.linears.shapes.values()
    of_numbers = sum(inputs + outputs for inputs, outputs in linears)
    of_scales = 4 * len(linears)
    assert of_numbers + of_scales <= engine.info.adapter_rank_bytes <= of_numbers + of_scales + 64
    assert engine.info.adapter_rank_tile == RANK_STEP
