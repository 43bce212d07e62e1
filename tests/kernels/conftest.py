"""The compiled kernels, with each set of instructions that this CPU has."""

from collections.abc import Iterator

import pytest
import torch

from motet_kernels.cpp import Library, build
from motet_kernels.cpp.compiler import INSTRUCTION_SETS, InstructionSet, cpu_flags
from testbed.compiled_kernels import CACHE, needs_a_compiler


@pytest.fixture(
    scope="module", params=[one for one in INSTRUCTION_SETS if one.cpu_flags <= cpu_flags()], ids=lambda one: one.name
)
def library(request: pytest.FixtureRequest) -> Library:
    needs_a_compiler()
    wanted: InstructionSet = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("motet_kernels.cpp.builder.cpu_flags", lambda: wanted.cpu_flags)
        built = build(CACHE)
    assert built.instructions == wanted.name
    return built.library


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
