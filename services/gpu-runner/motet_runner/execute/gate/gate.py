"""The gate for all that replaces a model's modules: results must be as near to the truth as the modules' own.

The truth is what the modules compute in a wider type, for a few texts. In the type that serves, with torch's kernels,
the modules' own error is rounding: that error of each token is the yardstick. The judged kernels' errors are compared
with the yardstick of the same tokens. Modules and judged kernels compute the texts in iterations like those that serve:
beside each other, in chunks and token by token, with adapters on every linear.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

import torch

from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.protocol import Forward
from motet_runner.execute.gate.memory_needs import check_room, judgement_bytes
from motet_runner.execute.gate.texts import CROWD, PARTS
from motet_runner.execute.gate.yardstick import Judged, Wrong, Yardstick, find_yardstick
from motet_runner.memory.out_of_memory import device_has_failed

_Part = tuple[torch.Tensor, torch.Tensor]
"""A part of a judgement: the tokens' places among all texts' tokens, and each token's mean square error"""


class Gate:
    """The gate refuses what it cannot judge, for any reason, and does not try again."""

    def __init__(self, loaded: LoadedModel, *, threads: Sequence[int] = ()) -> None:
        """`threads`: the numbers of threads with which forward passes are judged; empty: the present number"""
        self._loaded = loaded
        self._threads = threads
        self.yardstick: Yardstick | None = None
        self._missing = ""
        """Why there will be no yardstick"""

    def prepare(self, kernels: Judged) -> Iterator[None]:
        """Find the truth, in parts, while the modules have their own weights. If that fails, nothing passes. Call this
        in inference mode. `kernels`: any that may be judged; an adapter has the same numbers in all kernels."""
        if self.yardstick is not None or self._missing:
            return
        try:
            self.yardstick = yield from find_yardstick(self._loaded, kernels)
        except Exception as error:
            self._missing = not_judged(error)

    def fault_of(self, kernels: Judged) -> Generator[None, None, str]:
        """→ why attention and add_lora of these kernels cannot serve beside the modules; empty if they can. Judges in
        parts. Call this while the modules have their own weights."""
        yield from self.prepare(kernels)
        return (yield from self.fault_of_forward(kernels, None))

    def fault_of_forward(self, kernels: Judged, fused: Forward | None) -> Generator[None, None, str]:
        """→ why this forward pass cannot serve; empty if it can. Judges in parts. Call `prepare` before. `fused`: None
        for the modules"""
        yardstick, dtype = self.yardstick, self._loaded.dtype
        if yardstick is None:
            return self._missing or "not judged: nothing is known that is right"
        trial = replace(self._loaded, fused=fused)
        counts = (fused is not None and self._threads) or [torch.get_num_threads()]
        judged = [(PARTS, threads) for threads in counts]
        if fused is not None:
            judged.append((CROWD, counts[0]))
        places, squares = [], []
        try:
            check_room(self._loaded, judgement_bytes(self._loaded))
            make = kernels.add_lora.make
            for session, threads in judged:
                errors = yardstick.errors(
                    trial, session, lambda memory: make(yardstick.groups, memory, dtype, 0), kernels.attention
                )
                for computed, error in _with_threads(threads, errors):
                    places.append(computed)
                    squares.append(error)
                    yield
        except Wrong as wrong:
            return str(wrong)
        except Exception as error:
            return not_judged(error)
        return yardstick.fault(torch.cat(places), torch.cat(squares))


def _with_threads(threads: int, parts: Iterator[_Part]) -> Iterator[_Part]:
    """Between two parts the engine may compute, with its usual number of threads."""
    while True:
        usual = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            part = next(parts, None)
        finally:
            torch.set_num_threads(usual)
        if part is None:
            return
        yield part


def not_judged(error: Exception) -> str:
    """Raises the error if the device has failed for good."""
    if device_has_failed(error):
        raise error
    return f"not judged: {reason_of(error)}"


def reason_of(error: Exception) -> str:
    """The error in one line"""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
