"""Which kernels compute adapters and attention: those of torch, the compiled ones, or those of a GPU.

`engine.kernels` names them. With `auto` on a GPU, those in Triton serve if they pass a test on the model, else torch's.
With `auto` on a CPU, torch's serve at first, and a thread builds the compiled ones. The engine
takes them when they are tested and no sequence lives (`kernel_change.py`): so the numbers of a sequence do not change
under it. While they may still come, torch's compute with the model as it was loaded, because packing takes time. If
none come, torch's get packed weights and a fused forward, too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import structlog
import torch

from motet.errors import SetupError
from motet.runner_info import KernelState
from motet_kernels import LinearGroup, LoraBackend, RunLayout, TiledBackend, TorchBackend
from motet_kernels.cpp import Built, CannotBuild, CppBackend, Library, PagedAttention, build
from motet_kernels.gpu import triton_is_here
from motet_runner.execute.flat_batch import SequenceAttention
from motet_runner.execute.forward import MakeForward
from motet_runner.execute.packed_linears import LibraryPacking, Packing, TorchPacking
from motet_runner.memory.paged import READ_BYTES

log = structlog.get_logger(__name__)

KNOWN = ("auto", "torch", "cpp", "triton", "exact")


MakeLayout = Callable[[int, Sequence[LinearGroup], torch.dtype], RunLayout]
"""Gets a rank, a multiple of the tile, and what the model computes in."""


@dataclass(frozen=True)
class LargestWork:
    """What a back end may be asked for at most"""

    rows: int
    """Of an iteration"""
    decodes: int
    """Of them, rows that decode"""
    max_rank: int
    groups: Sequence[LinearGroup]
    heads: int
    head_dim: int
    layer_bytes: int
    """Keys and values of the longest sequence in one layer"""


class Kernels(Protocol):
    @property
    def name(self) -> str:
        """As the log says it"""

    @property
    def tile(self) -> int:
        """Of their back end of add_lora. It is the same for all that may follow each other in one engine: adapters stay
        where they are."""

    @property
    def make_layout(self) -> MakeLayout:
        """The layout of adapters' runs. It is the same, too, for all that may follow each other."""

    @property
    def copies(self) -> bool:
        """Whether their back end of add_lora takes bytes beside the memory."""

    @property
    def library(self) -> Library | None:
        """For the model's own linears and its fused forward; None: torch's"""

    @property
    def packing(self) -> Packing | None:
        """How weights are packed; None: the model stays as it was loaded."""

    @property
    def makes_forward(self) -> MakeForward | None:
        """Their own fused forward; None: that of the library, or torch's"""

    @property
    def has_threads(self) -> bool:
        """Whether they compute on threads, of which there may be more or fewer."""

    def lora(
        self, groups: Sequence[LinearGroup], memory: torch.Tensor, dtype: torch.dtype, copy_bytes: int
    ) -> LoraBackend[Any]:
        """The back end of add_lora that reads adapters from `memory` [bytes]."""

    def room_bytes(self, work: LargestWork) -> int:
        """Of a GPU's memory, what they keep beside weights, pages and `copy_bytes`"""

    def attention(self, pages: torch.Tensor) -> SequenceAttention | None:
        """Attention over these pages, see PagedStore; None: torch's, over pages that were brought together."""


class TorchKernels:
    name = "torch"
    library = None
    makes_forward = None
    has_threads = True
    tile = TorchBackend.tile
    make_layout = RunLayout
    copies = TorchBackend.copies

    def __init__(self, *, packed: bool) -> None:
        """`packed`: weights are packed, and some families have a fused forward."""
        self.packing = TorchPacking() if packed else None

    @staticmethod
    def lora(
        groups: Sequence[LinearGroup], memory: torch.Tensor, dtype: torch.dtype, copy_bytes: int
    ) -> LoraBackend[Any]:
        return TorchBackend(groups, memory, dtype, copy_bytes=copy_bytes)

    @staticmethod
    def room_bytes(work: LargestWork) -> int:
        return max(READ_BYTES["cuda"], work.layer_bytes)  # of pages that were brought together

    @staticmethod
    def attention(pages: torch.Tensor) -> SequenceAttention | None:  # noqa: ARG004
        return None


class ExactKernels:
    """Of exact mode, whose attention comes with its tiles (`tiles.py`)"""

    name = "exact"
    library = None
    packing = None
    makes_forward = None
    has_threads = False
    tile = TiledBackend.tile
    make_layout = RunLayout
    copies = TiledBackend.copies

    @staticmethod
    def lora(
        groups: Sequence[LinearGroup],
        memory: torch.Tensor,
        dtype: torch.dtype,
        copy_bytes: int,  # noqa: ARG004
    ) -> LoraBackend[Any]:
        return TiledBackend(groups, memory, dtype)

    @staticmethod
    def room_bytes(work: LargestWork) -> int:  # noqa: ARG004
        return 0

    @staticmethod
    def attention(pages: torch.Tensor) -> SequenceAttention | None:  # noqa: ARG004
        return None


class CompiledKernels:
    makes_forward = None
    has_threads = True
    tile = CppBackend.tile
    make_layout = RunLayout
    copies = CppBackend.copies

    def __init__(self, library: Library, instructions: str) -> None:
        self.library = library
        self.packing = LibraryPacking(library)
        self.name = f"cpp ({instructions})"

    def lora(
        self,
        groups: Sequence[LinearGroup],
        memory: torch.Tensor,
        dtype: torch.dtype,
        copy_bytes: int,  # noqa: ARG002
    ) -> LoraBackend[Any]:
        return CppBackend(groups, memory, dtype, library=self.library)

    @staticmethod
    def room_bytes(work: LargestWork) -> int:  # noqa: ARG004
        return 0

    def attention(self, pages: torch.Tensor) -> SequenceAttention | None:
        return PagedAttention(self.library, pages)


def check_name(kernels: str) -> None:
    if kernels not in KNOWN:
        raise SetupError(f"engine.kernels {kernels!r} is unknown. Choose one of {', '.join(KNOWN)}.")


def _is_int8(adapter_dtype: str, kernels: str) -> bool:
    if adapter_dtype not in ("auto", "int8"):
        raise SetupError(f"engine.adapter_dtype {adapter_dtype!r} is unknown. Choose one of auto, int8.")
    if adapter_dtype == "int8" and kernels not in ("auto", "triton"):
        raise SetupError(
            f"engine.adapter_dtype is int8, which only the kernels triton compute with, and engine.kernels is "
            f"{kernels}. Change one of them to auto."
        )
    return adapter_dtype == "int8"


FaultOf = Callable[[Kernels], str]
"""Why these kernels cannot serve the model that was loaded; empty if they can."""


def _not_compiled(why: str) -> str:
    return (
        f"there are no compiled kernels: {why} (MOTET_RUNNER_COMPILER names a compiler, MOTET_RUNNER_KERNEL_CACHE the "
        "folder)"
    )


class KernelChoice:
    """The kernels that an engine begins with, and those that may come later."""

    def __init__(
        self,
        kernels: str,
        device: torch.device,
        cache: Path | None,
        compiler: str = "",
        *,
        adapter_dtype: str = "auto",
        utilization_percent: int = 100,
    ) -> None:
        """`cache`: the folder of compiled kernels; None: nothing is compiled. `adapter_dtype`: `auto` or `int8`.
        `utilization_percent`: how much of a GPU's memory this process may take in all"""
        self._percent = utilization_percent
        check_name(kernels)
        self._int8 = _is_int8(adapter_dtype, kernels)
        if self._int8:
            kernels = "triton"
        self._build: _BackgroundBuild | None = None
        self._since = time.time()
        self._note = ""
        self._to_test: Kernels | None = None
        """Serve if they pass their test"""
        self._test_decides = kernels == "auto"
        """Whether others serve where they do not"""
        on_cpu = device.type == "cpu"
        may_build = kernels == "auto" and on_cpu and cache is not None
        self.serving: Kernels = TorchKernels(packed=on_cpu and not may_build)
        if kernels in ("cpp", "exact") and not on_cpu:
            raise SetupError(f"engine.kernels is {kernels}, which computes on a CPU, and the device is {device}.")
        if kernels == "triton" or (kernels == "auto" and not on_cpu):
            self._to_test = self._triton(device)
        if kernels == "exact":
            self.serving = ExactKernels()
        elif kernels == "cpp":
            if cache is None:
                raise SetupError("engine.kernels is cpp, and there is no folder for compiled kernels.")
            try:
                self.serving = _compiled(build(cache, compiler))
            except CannotBuild as error:
                raise SetupError(f"engine.kernels is cpp, and {_not_compiled(str(error))}.") from error
        elif may_build and cache is not None:
            self._build = _BackgroundBuild(lambda: build(cache, compiler))

    @property
    def waiting(self) -> bool:
        """Whether others may come."""
        return self._build is not None

    @property
    def packing(self) -> Packing | None:
        """That of the kernels to begin with; None: they do not pack, or are not known before the model is loaded."""
        return self.serving.packing if self._to_test is None else None

    def begin(self, fault_of: FaultOf) -> Kernels:
        """Those to begin with: a GPU's if they pass their test, or the compiled ones if they are there already."""
        if self._to_test is not None:
            fault = fault_of(self._to_test)
            if not fault:
                self.serving = self._to_test
            else:
                self._without_triton(f"their test on this model failed: {fault}")
        self.serving = self.built() or self.serving
        return self.serving

    def began(self, kernels: Kernels, note: str) -> None:
        """The kernels to begin with serve. `note`: what does not serve, or is not packed, and why."""
        self._serve(kernels, note)
        log.info("kernels_chosen", serving=self.serving.name, building=self.waiting)

    def built(self) -> Kernels | None:
        """Those that follow, once: the compiled kernels when they are built and tested, or torch's with packed weights
        if they cannot be built."""
        building = self._build
        if building is None or not building.ended:
            return None
        self._build = None
        if building.result is None:
            log.info("kernels_not_compiled", serving=self.serving.name, reason=building.failure)
            self._note = _not_compiled(building.failure)
            return TorchKernels(packed=True)
        self._note = "the compiled kernels are tested, and serve soon"
        return _compiled(building.result)

    def refused(self, fault: str) -> Kernels:
        """The compiled kernels cannot serve this model → those that do."""
        if not self._test_decides:
            raise SetupError(f"engine.kernels is cpp, and its kernels cannot serve: {fault}. Use auto.")
        log.warning("compiled_kernels_do_not_serve", reason=fault)
        self._note = f"the compiled kernels do not serve: {fault}"
        return TorchKernels(packed=True)

    def changed(self, kernels: Kernels, note: str, *, seconds: float) -> None:
        """These serve now. `seconds`: what the change took, with the requests in between."""
        self._serve(kernels, note)
        log.info("kernels_changed", serving=kernels.name, seconds=round(seconds, 3))

    def not_changed(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        log.error("kernels_not_changed", serving=self.serving.name, reason=reason, exc_info=error)
        self._note = f"the compiled kernels do not serve: {reason}"

    def _triton(self, device: torch.device) -> Kernels | None:
        if not triton_is_here():
            self._without_triton("Triton is not installed. Install motet[gpu]")
            return None
        from motet_runner.execute.triton_kernels import TritonKernels, computes_here

        if not computes_here(device):
            self._without_triton(f"they compute on a GPU, and the device is {device}")
            return None
        return TritonKernels(device, int8=self._int8, utilization_percent=self._percent)

    def _without_triton(self, reason: str) -> None:
        if not self._test_decides:
            asked = "engine.kernels is triton, and its" if not self._int8 else "engine.adapter_dtype is int8, whose"
            raise SetupError(f"{asked} kernels cannot serve: {reason}. Or use auto.")
        log.warning("gpu_kernels_do_not_serve", serving=self.serving.name, reason=reason)
        self._note = f"the GPU's kernels do not serve: {reason}"

    def _serve(self, kernels: Kernels, note: str) -> None:
        self.serving = kernels
        self._since = time.time()
        if note:
            self._note = note
        elif kernels.library is not None:
            self._note = ""

    @property
    def state(self) -> KernelState:
        """For people"""
        note = "the compiled kernels are being built" if self.waiting else self._note
        return KernelState(self.serving.name, self._since, note)


def _compiled(built: Built) -> CompiledKernels:
    if built.damaged:
        log.warning("kernels_made_again", damaged=built.damaged)
    if built.skipped:
        log.warning("faster_kernels_skipped", reasons=built.skipped, serving=built.instructions)
    return CompiledKernels(built.library, built.instructions)


class _BackgroundBuild:
    """A thread that waits for the compiler, which is a process of its own."""

    def __init__(self, compile_kernels: Callable[[], Built]) -> None:
        self.result: Built | None = None
        self.failure = ""
        self._compile = compile_kernels
        self._thread = Thread(target=self._run, name="build-kernels", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._compile()
        except CannotBuild as error:
            self.failure = str(error)
        except Exception as error:  # a build that fails must not end the engine
            self.failure = f"{type(error).__name__}: {error}"
