"""Reads a checked adapter into host memory, on a thread of its own, so that no iteration waits for a disk (PU-07).

The result is ready to be copied to the device: in the engine's data type, multiplied by the scale, and in the back
end's layout. The part that has been read may be copied while the rest is read. An adapter's slab holds these bytes. If
there is none, or it is damaged, they are made of the checked bytes.
"""

import errno
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import structlog
import torch

from motet.errors import AdapterIncompatible
from motet_kernels import RunLayout
from motet_runner.adapters.layout import AdapterLayout, LoraLinear, StoredTensor
from motet_runner.adapters.load_threads import THREADS
from motet_runner.adapters.slab import Slab, SlabDamaged, remove_damaged
from motet_runner.adapters.weight_reader import WeightReader, has_changed
from motet_runner.plan.step_plan import LoadedContents

log = structlog.get_logger(__name__)

PACE_SECONDS = 1.0
"""The thread waits at most this time for the engine's next iteration, and then reads on."""


MAX_BYTES_TOGETHER = 4 << 20
"""Of linears that are read together, if the engine allows so much"""


class BaseLinear(NamedTuple):
    """What DoRA and trained biases need to know of a linear. All tensors are on the host."""

    squares: Callable[[], torch.Tensor]
    """Gives [outputs] of each row of the weight, the sum of its squares, in fp32. The first call reads the weight."""
    bias: torch.Tensor | None
    multiply: Callable[[torch.Tensor], torch.Tensor]
    """Gets rows [n, inputs] → their products with the weight, without the bias [n, outputs]"""


BaseLinearOf = Callable[[str], BaseLinear]
"""Gets the path of a linear"""


class HostLoad:
    """The load of one adapter into host memory. All sequences that wait for the adapter share it.

    The engine allows a number of bytes in each iteration, because reading takes time from the engine's thread. The
    thread is a daemon: if the file system hangs, the load never ends, and the process can still exit.
    """

    def __init__(
        self,
        adapter: AdapterLayout,
        layout: RunLayout,
        base: BaseLinearOf | None = None,
        *,
        pinned: bool,
        memory: torch.Tensor | None = None,
    ) -> None:
        """`base`: needed if the adapter scales the linears' own results. `memory`: of an earlier load. New memory takes
        longer than what is read into it: the operating system gives it page by page."""
        self.layout = layout
        self.run: torch.Tensor | None = None
        """[bytes] in `layout`, in pinned memory if the device is a GPU; None before anything is read. It holds zeros
        for linears that the adapter does not change."""
        self.linears: frozenset[str] = frozenset()
        """The linears that the adapter changes; known once `run` is set"""
        self.scales = False
        """True if the adapter scales the linears' own results; known once `run` is set"""
        self.read_bytes = 0
        """The first `read_bytes` bytes of `run` are final."""
        self.from_slab = False
        """True if all was in the adapter's slab; known at the end"""
        self.lacks_slab = False
        """True if the slab is missing, or was damaged and is removed; known at the end"""
        self.cpu_seconds = 0.0
        """Of the reading thread; known at the end"""
        self.memory = memory
        """What the next load may use once this one has ended, and all copies of `run`"""
        self._adapter = adapter
        self._base = base
        self._pinned = pinned
        self._condition = threading.Condition()
        self._done = 0
        self._allowed = 0.0
        self._given_up = False
        self._reader: WeightReader | None = None
        self._ended = threading.Event()
        self._error: BaseException | None = None
        THREADS.run(self._run)

    def allow(self, size: float) -> None:
        """Let the thread read `size` more bytes than so far."""
        with self._condition:
            self._allowed = self._done + size
            self._condition.notify()

    def give_up(self) -> None:
        """The adapter is no longer needed: read no further."""
        with self._condition:
            self._given_up = True
            self._condition.notify()

    def ended(self, wait_seconds: float = 0.0) -> bool:
        """True if everything has been read from the file that was checked. Raises the error of the reading thread."""
        ended = self._ended.wait(wait_seconds)
        if self._error is not None:
            raise self._error
        return ended

    @property
    def progress(self) -> int:
        """Grows with each read that the disk answers."""
        return self.read_bytes + (self._reader.given if self._reader is not None else 0)

    @property
    def thread_ended(self) -> bool:
        """True if the thread writes to the memory no more."""
        return self._ended.is_set()

    def _run(self) -> None:
        began = time.thread_time()
        try:
            with torch.inference_mode():
                self._read_all()
        except BaseException as error:  # `ended` raises it on the engine's thread
            self._error = error
        self.cpu_seconds = time.thread_time() - began
        self._ended.set()

    def _read_all(self) -> None:
        fresh = self.memory is None or len(self.memory) < self.layout.bytes
        if self.memory is None or fresh:
            self.memory = _zeros(self.layout.bytes, pinned=self._pinned)
        run = self.memory[: self.layout.bytes]
        if self._adapter.slab:
            try:
                self._read_slab(run, zeros=fresh)
            except FileNotFoundError:
                self.lacks_slab = True
            except (SlabDamaged, OSError) as error:
                fresh = False
                if isinstance(error, SlabDamaged) or error.errno == errno.EIO:
                    self.lacks_slab = remove_damaged(self._adapter)
                    result = "is removed, and written again" if self.lacks_slab else "stays: the disk takes no writes"
                    log.warning("slab_damaged", file=self._adapter.slab, result=f"it {result}")
            else:
                self.from_slab = True
                return
        if not fresh:
            run[self.read_bytes :] = 0  # what is before may be on its way to the device, and is right
        self._read_checked(run)

    def _read_slab(self, run: torch.Tensor, *, zeros: bool) -> None:
        if not self._adapter.file_unchanged():
            raise has_changed(self._adapter)
        into = run.numpy()
        with Slab(self._adapter, self.layout.bytes, self.layout.offsets) as slab:
            self.linears, self.scales = slab.changed, slab.scales
            for part, at in slab.places():
                self._keep_pace()
                slab.read(part, at, into)
                if not zeros:
                    into[self.read_bytes : part.begin] = 0
                self._done += part.size
                self.read_bytes = part.end
                self.run = run
            slab.verified()
        if not zeros:
            into[self.read_bytes :] = 0
        self.run = run
        self.read_bytes = self.layout.bytes

    def _read_checked(self, run: torch.Tensor) -> None:
        try:
            linears = {linear.module: linear for linear in self._adapter.linears}
        except (OSError, ValueError) as error:
            raise has_changed(self._adapter) from error
        unknown = next((module for module in linears if module not in self.layout.offsets), None)
        if unknown is not None:
            raise AdapterIncompatible(
                f"The adapter has weights for {unknown}, which is not a linear layer of this model. Check the adapter "
                "against this model first."
            )
        self._reader = WeightReader(self._adapter)
        with self._reader as matrices:
            self.linears = frozenset(linears)
            self.scales = any(linear.scales for linear in linears.values())
            self.run = run
            ordered = [
                (self.layout.begin(group), linears[module])
                for group in self.layout.groups
                for module in group.outputs
                if module in linears
            ]
            while ordered:
                self.read_bytes = max(self.read_bytes, ordered[0][0])
                count, size = _first_of(ordered, min(self._keep_pace(), MAX_BYTES_TOGETHER))
                self._read_together([linear for _, linear in ordered[:count]], matrices, run)
                self._done += size
                del ordered[:count]
            self.read_bytes = self.layout.bytes

    def _read_together(self, linears: Sequence[LoraLinear], matrices: WeightReader, run: torch.Tensor) -> None:
        alike: defaultdict[tuple[object, ...], list[tuple[LoraLinear, StoredTensor, StoredTensor]]] = defaultdict(list)
        for linear in linears:
            if linear.scales:
                self._read_scaling(linear, matrices, run)
            else:
                assert linear.a is not None
                assert linear.b is not None
                key = linear.a.dtype, linear.a.shape, linear.b.dtype, linear.b.shape
                alike[key].append((linear, linear.a, linear.b))
        for of_shape in alike.values():
            some, every_a, every_b = zip(*of_shape, strict=True)
            a, b = matrices.read_alike(every_a), matrices.read_alike(every_b)
            self.layout.write_alike(run, [one.module for one in some], a, b, [one.scale for one in some])

    def _read_scaling(self, linear: LoraLinear, matrices: WeightReader, run: torch.Tensor) -> None:
        module = linear.module
        assert self._base is not None, "the adapter scales, and nothing is known of the base"
        base = self._base(module)
        outputs = len(self.layout.scaling(run, module)[0])
        c, e = torch.ones(outputs, dtype=torch.float32), torch.zeros(outputs, dtype=torch.float32)
        if linear.a is not None and linear.b is not None:
            a, b = matrices.read(linear.a), matrices.read(linear.b).float()
            if linear.magnitude is not None:
                norms = norms_of_changed(base, a.float(), linear.scale * b)
                c = matrices.read(linear.magnitude).float() / norms
                b = c.unsqueeze(1) * b
                if base.bias is not None:  # DoRA scales the product without the bias
                    e = base.bias.float() * (1 - c)
            if linear.lora_bias is not None:
                e = e + linear.scale * c * matrices.read(linear.lora_bias).float()
            self.layout.write(run, module, a, b, linear.scale)
        if linear.bias is not None:
            assert base.bias is not None, "the check refuses a bias for a linear without one"
            e = e + matrices.read(linear.bias).float() - base.bias.float()
        self.layout.write_scaling(run, module, c, e)
        if not self.layout.is_finite(run, module):  # DoRA scales B, too
            raise AdapterIncompatible(
                f"What changes the result of {module} can't be computed in {self.layout.dtype}: it is infinite or not "
                "a number. The training has diverged. Use an earlier checkpoint."
            )

    def _keep_pace(self) -> float:
        """How many bytes may be read now; none or less if the engine has not come for long"""
        with self._condition:
            self._condition.wait_for(lambda: self._done < self._allowed or self._given_up, PACE_SECONDS)
            if self._given_up:
                raise _GivenUp
            return self._allowed - self._done


class KeptInHost:
    """A load of an adapter that was read before: all of it is in host memory. See `HostLoad`."""

    lacks_slab = False
    thread_ended = True
    cpu_seconds = 0.0
    memory = None

    def __init__(self, layout: RunLayout, run: torch.Tensor, contents: LoadedContents) -> None:
        self.layout = layout
        self.run = run
        self.read_bytes = self.progress = layout.bytes
        self.linears, self.scales, self.from_slab = contents.linears, contents.scales, contents.from_slab

    def allow(self, size: float) -> None:
        pass

    def give_up(self) -> None:
        pass

    def ended(self, wait_seconds: float = 0.0) -> bool:  # noqa: ARG002
        return True


def norms_of_changed(base: BaseLinear, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[outputs] the lengths of the rows of W + B · A, for A [rank, inputs] and B [outputs, rank] in fp32.

    Of the weight this needs only a product with a few rows, as any iteration computes it: for row w of W and row b of
    B, ‖w + bA‖² = ‖w‖² + 2 b(Aw) + b(AAᵀ)b.
    """
    with_weight = base.multiply(a).t().float()
    squares = base.squares() + (b * (2 * with_weight + b @ (a @ a.t()))).sum(1)
    return squares.clamp_min(0).sqrt()


class _GivenUp(Exception):
    pass


def _first_of(ordered: Sequence[tuple[int, LoraLinear]], most_bytes: float) -> tuple[int, int]:
    """How many linears are read next, at least one, and their bytes. One that scales is read alone: what it needs to
    know of the base takes long."""
    size = 0
    for count, (_, linear) in enumerate(ordered):
        of_it = sum(tensor.bytes for tensor in linear.tensors)
        if count and (size + of_it > most_bytes or linear.scales or ordered[0][1].scales):
            return count, size
        size += of_it
    return len(ordered), size


def _zeros(size: int, *, pinned: bool) -> torch.Tensor:
    if pinned:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    # The operating system gives this memory page by page, at the first write. torch.zeros would write all of it.
    return torch.from_numpy(np.zeros(size, dtype=np.uint8))
