"""Llama, with grouped heads, through an engine on the GPU's kernels."""

from collections import Counter
from pathlib import Path

import pytest

from motet_runner.execute.forward.gpu import GpuForward
from tests.gpu.served_family import serve_as_peft

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def test_an_engine_equals_peft_in_few_launches(tmp_path: Path) -> None:
    run = serve_as_peft("Llama", tmp_path)
    layers = run.engine.diagnostics.loaded.shape.layers
    assert isinstance(run.engine.diagnostics.loaded.fused, GpuForward)
    of_a_decode = Counter(next(trace for trace in reversed(run.launches) if trace))
    of_lora = sum(count for name, count in of_a_decode.items() if name.startswith("lora_"))
    print(f"launches of our kernels in a decode step of {layers} layers: {dict(of_a_decode)}")
    assert 0 < of_lora <= 8 * layers, "shrink and expand for each of the four groups of linears"
    assert of_a_decode["_add_norm_kernel"] == 2 * layers + 1
    assert of_a_decode["_rotate_and_write_kernel"] == of_a_decode["_silu_multiply_kernel"] == layers
    assert of_a_decode["write_rows"] == 0, "keys and values are written where they are rotated"
