"""GPT-2, which has no fused forward, through an engine on the GPU's kernels: its modules, our attention and LoRA."""

from pathlib import Path

import pytest

from tests.gpu.devices import IN_A_SOAK
from tests.gpu.served_family import serve_as_peft

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
    *IN_A_SOAK,  # `test_forward.py` has modules that compute with these kernels
]


def test_an_engine_equals_peft(tmp_path: Path) -> None:
    run = serve_as_peft("GPT-2", tmp_path)
    assert run.engine.diagnostics.loaded.fused is None
    assert any("attend_pieces" in trace and "lora_shrink" in trace for trace in run.launches)
