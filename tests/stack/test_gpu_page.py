"""The tutorial for a GPU, on vLLM's build for CPUs: the test types every command that needs no registry."""

from pathlib import Path

import pytest

from tests.runner.external.vllm_itself import ENVIRONMENT, needs_vllm
from tests.stack.test_pages import type_laptop_page

pytestmark = [pytest.mark.stack, pytest.mark.soak, needs_vllm, pytest.mark.timeout(1200)]


def test_the_page_for_a_gpu_does_what_it_says(tmp_path: Path) -> None:
    type_laptop_page(tmp_path, "tutorials/gpu.md", also={"vllm": ENVIRONMENT}, timeout_s=600)
