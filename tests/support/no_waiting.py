"""A CPU in the place of a GPU: what would wait for a GPU's values is an error."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITING = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default),  # noqa: SLF001
    *(aten._unique2.default, aten.is_nonzero.default),  # noqa: SLF001
}
"""Their results, or the sizes of these, depend on values"""

BY_HAND = ("numpy", "tolist", "item", "__array__", "__bool__", "__int__", "__float__", "__index__")
"""Ways to values that no operation shows on a CPU"""


class Waited(AssertionError):
    pass


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if func in WAITING or by_mask:
            raise Waited(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting() -> Iterator[None]:
    """In this thread"""
    here = get_ident()

    def refuse(name: str) -> Any:
        usual = getattr(torch.Tensor, name)

        def refused(*given: Any, **named: Any) -> Any:
            if get_ident() == here:
                raise Waited(name)
            return usual(*given, **named)

        return refused

    with ExitStack() as stack:
        for name in BY_HAND:
            stack.enter_context(patch.object(torch.Tensor, name, refuse(name)))
        stack.enter_context(_Watch())  # type: ignore[no-untyped-call]
        yield
