"""A device whose memory ends in the middle of an iteration: an operation that takes memory fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

from torch import OutOfMemoryError
from torch.utils._python_dispatch import TorchDispatchMode

from motet_runner.execute.batch.memory_parts import InParts
from motet_runner.plan.presets import UNBOUNDED

_FIRST, _AGAIN = 0.8, 0.3
"""How likely the first attempt of an iteration fails, and one of a part of it"""
_GUESS = 25
"""Operations of an attempt, as long as none has come to its end"""


class Counts(TorchDispatchMode):
    def __init__(self, last: int) -> None:
        """`last`: the operation that takes memory and fails, from 1; 0: none"""
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self._last = last

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if all(result.alias_info is None for result in func._schema.returns):  # it returns a new tensor  # noqa: SLF001
            self.operations += 1
            if self.operations == self._last:
                raise OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


class Failures:
    """How often memory has ended"""

    count = 0
    first = 0
    """Of these, in an attempt of a kind that had never come to its end: buffers grow in it"""


@contextmanager
def memory_that_ends(seed: int, *, near_the_end: bool) -> Iterator[Failures]:
    """In most attempts to compute several rows, and now and then again when they are computed in parts.
    `near_the_end`: among the last operations of an attempt, where what stays is changed"""
    random, failures = Random(seed), Failures()
    operations: dict[tuple[int, bool], int] = {}
    """Of the newest attempt of each kind that came to its end"""
    fits = InParts._fits  # noqa: SLF001

    def attempt(its: InParts[Any], plan: Any, flight: Any) -> bool:
        kind = (plan.count, bool(plan.prefills))
        known = kind in operations
        usual = operations.get(kind) or max(operations.values(), default=_GUESS)
        its.decodes.size = UNBOUNDED  # all at once, although it did not suffice before
        ends = plan.count > 1 and random.random() < (_AGAIN if flight.retries else _FIRST)
        lowest = max(1, usual - 12) if near_the_end and known else 1
        with Counts(random.randint(lowest, usual) if ends else 0) as counts:
            computed = fits(its, plan, flight)
        if computed:
            operations[kind] = counts.operations
        else:
            failures.count += 1
            failures.first += not known
        return computed

    with patch.object(InParts, "_fits", attempt):
        yield failures
