"""Calls that are wrong, each in a process of its own: the library with sanitizers must refuse every one, and say why.

`tools.sanitize.under` runs it.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import torch

from motet_kernels.cpp.attention import PAGE_TOKENS, PagedAttention
from motet_kernels.cpp.linear import PackedWeights
from testbed.compiled_kernels import compiled_library

LIBRARY = compiled_library()
ROWS, INPUTS, OUTPUTS, RANK = 3, 48, 40, 8


def linear(*, dtype: torch.dtype = torch.float32, stride: int = INPUTS, rows: int = ROWS, bias: int = OUTPUTS) -> None:
    packed = PackedWeights(LIBRARY, [torch.ones(OUTPUTS, INPUTS)])
    x, y, biases = torch.ones(2 * ROWS, INPUTS, dtype=dtype), torch.ones(ROWS, OUTPUTS), torch.ones(bias)
    LIBRARY.linear(0, x.data_ptr(), stride, rows, INPUTS, packed.address, biases.data_ptr(), y.data_ptr(), OUTPUTS,
                   OUTPUTS, 1)  # fmt: skip


def add_lora(*, rank: int = RANK, run: int = RANK * (INPUTS + OUTPUTS), stop: int = ROWS, scaled: bool = False) -> None:
    memory, products = torch.ones(run), torch.ones(rank * stop)
    x, y = torch.ones(ROWS, INPUTS), torch.ones(ROWS, OUTPUTS)
    scales = 4 * rank * (INPUTS + OUTPUTS) if scaled else -1
    offsets = np.array([[0, 4 * rank * INPUTS, scales]], dtype=np.int64)
    segments = np.array([[0, stop, rank, memory.data_ptr(), offsets.ctypes.data]], dtype=np.int64)
    LIBRARY.add_lora(0, segments.ctypes.data, 1, products.data_ptr(), 1, 0, INPUTS, OUTPUTS, x.data_ptr(), INPUTS,
                     y.data_ptr(), OUTPUTS)  # fmt: skip


def attention(*, pages: tuple[int, int] = (0, 1), first: int = 1, heads: int = 2) -> None:
    """Two sequences, of one row and one page each"""
    paged = PagedAttention(LIBRARY, torch.zeros(2, 1, 2, 1, PAGE_TOKENS, 8))
    table = np.array([[pages[0]], [pages[1]]], dtype=np.int32)
    batch = paged.make_batch(table, np.array([[0, 1, 3, 0], [first, 1, 3, 1]], dtype=np.int64))
    query, key = torch.ones(heads, 2, 8), torch.ones(1, 2, 8)
    out = torch.ones(2, 2, 8)
    LIBRARY.attention(0, batch.address, 0, 2, query.data_ptr(), key.data_ptr(), key.data_ptr(), 16, 8, 16, 8, 16, 8,
                      out.data_ptr(), 1.0, 0, 0.0)  # fmt: skip


def largest() -> None:
    logits, chosen = torch.ones(ROWS, OUTPUTS), torch.ones(2 * ROWS, dtype=torch.int32)
    LIBRARY.largest(0, logits.data_ptr(), ROWS, OUTPUTS, chosen.data_ptr())


RIGHT: list[Callable[[], None]] = [
    linear,
    add_lora,
    lambda: add_lora(run=RANK * (INPUTS + OUTPUTS) + 2 * OUTPUTS, scaled=True),
    attention,
]
WRONG: dict[str, Callable[[], None]] = {
    "x of a linear is not what": lambda: linear(stride=INPUTS - 1),
    "x of a linear has numbers of another type": lambda: linear(dtype=torch.bfloat16),
    "y of a linear ends before": lambda: linear(rows=ROWS + 1),
    "the bias of a linear ends before": lambda: linear(bias=OUTPUTS - 1),
    "the rank of a segment": lambda: add_lora(rank=RANK - 2),
    "A and B of an adapter ends before": lambda: add_lora(run=RANK * (INPUTS + OUTPUTS) - 1),
    "the scales of an adapter ends before": lambda: add_lora(
        run=RANK * (INPUTS + OUTPUTS) + 2 * OUTPUTS - 1, scaled=True
    ),
    "x of add_lora ends before": lambda: add_lora(stop=ROWS + 1),
    "a page that a sequence writes into": lambda: attention(pages=(1, 1)),
    "the number of a page": lambda: attention(pages=(0, -1)),
    "a page ends before": lambda: attention(pages=(0, 2)),
    "a row has one sequence": lambda: attention(first=0),
    "queries ends before": lambda: attention(heads=1),
    "chosen has numbers of another type": largest,
}  # fmt: skip


def ending(call: Callable[[], None]) -> tuple[int, str]:
    """The signal that ends the process, and what it says"""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 2)
            call()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        said.seek(0)
        return os.WTERMSIG(status), said.read().decode(errors="replace")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for right in RIGHT:
        right()
    for why, call in WRONG.items():
        signaled, said = ending(call)
        if signaled != signal.SIGABRT or why not in said:
            sys.exit(f"ERROR: nobody refused a call because {why!r}: {said}")
    sys.stdout.write(f"{len(WRONG)} refused\n")
