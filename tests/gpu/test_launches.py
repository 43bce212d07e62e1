"""Kernels run, here or on a GPU, and their launches are counted."""

import torch
import triton
import triton.language as tl

from motet_kernels.gpu.launches import interpreted, launch, traced_launches
from tests.gpu.devices import DEVICE


@triton.jit
def add_one(numbers, COUNT: tl.constexpr):
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(numbers + places, tl.load(numbers + places) + 1)


def test_a_launch_runs_its_grid_of_programs_and_is_traced() -> None:
    numbers = torch.zeros(32, device=DEVICE)
    with traced_launches() as trace:
        launch(add_one, (2,), numbers, COUNT=8)
    launch(add_one, (1,), numbers, COUNT=8)
    assert numbers.tolist() == [2.0] * 8 + [1.0] * 8 + [0.0] * 16
    assert trace == ["add_one"]


def test_the_interpreter_runs_where_there_is_no_gpu() -> None:
    assert interpreted() == (DEVICE.type == "cpu")
