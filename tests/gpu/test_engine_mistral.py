"""Mistral, with a window that is shorter than prompts, through an engine on the GPU's kernels."""

from pathlib import Path

import pytest

from motet_runner.execute.forward.gpu import GpuForward
from tests.gpu.devices import IN_A_SOAK
from tests.gpu.served_family import serve_as_peft

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
    *IN_A_SOAK,  # `test_engine_int8.py` has a Mistral
]


def test_an_engine_equals_peft(tmp_path: Path) -> None:
    run = serve_as_peft("Mistral, sliding window", tmp_path)
    assert isinstance(run.engine.diagnostics.loaded.fused, GpuForward)
