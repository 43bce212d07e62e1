"""What is computed with one thread, whatever number the engine has chosen."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """With several threads, a product of torch's is cut into parts of other shapes, so its last digits may differ. And
    if other processes want the cores, each operator waits until its other threads get one.

    A thread of Python's whose first operator comes meanwhile keeps to one, too.
    """
    usual = torch.get_num_threads()
    if usual == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
