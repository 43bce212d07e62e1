"""The kernels with which an engine begins, and kernels that may follow. `choice_policy.py` decides; this module has the
thread, the log and the clock.

Compiled kernels that passed their test come into use while no sequence lives (`kernel_change.py`), so that a sequence's
numbers do not change while it runs. If no kernels can be compiled, torch's kernels get packed weights and a forward
pass of few operators.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import structlog
import torch

from motet.runner_info import KernelState
from motet_kernels.cpp import Built, CannotBuild, build
from motet_kernels.gpu import triton_is_here
from motet_runner.daemon_threads import DaemonThreads
from motet_runner.execute.kernels.choice_policy import BEING_BUILT, ChoicePolicy
from motet_runner.execute.kernels.compiled import of_built
from motet_runner.execute.kernels.roles import BackEnd, Kernels, by_role
from motet_runner.execute.kernels.torch import EXACT, torch_back_end
from motet_runner.execute.pack.linear_packing import Packing

log = structlog.get_logger(__name__)

FaultOf = Callable[[Kernels], str]
"""Gets kernels → why they cannot serve the model that was loaded; empty if they can."""


class KernelChoice:
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
        `utilization_percent`: the share of a GPU's memory that this process may take"""
        self._policy = policy = ChoicePolicy(
            kernels, str(device), adapter_dtype=adapter_dtype, has_folder=cache is not None
        )
        self._build: Future[Built] | None = None
        self._since = time.time()
        self.serving = by_role(torch_back_end(packed=policy.packs_at_once))
        self._to_test = self._triton(device, utilization_percent) if policy.wants_triton else None
        """Kernels that serve if they pass their test"""
        if policy.asked == "exact":
            self.serving = by_role(EXACT)
        elif policy.asked == "cpp" and cache is not None:
            try:
                self.serving = _with_torch(of_built(build(cache, compiler)))
            except CannotBuild as error:
                policy.not_compiled(str(error))
        elif policy.builds_meanwhile and cache is not None:
            self._build = DaemonThreads("build-kernels", 1).submit(lambda: build(cache, compiler))

    @property
    def waiting(self) -> bool:
        """True while compiled kernels are being built"""
        return self._build is not None

    @property
    def packing(self) -> Packing | None:
        """The first kernels' packing; None: they do not pack, or are known only after the model is loaded."""
        return self.serving.packing if self._to_test is None else None

    def begin(self, fault_of: FaultOf) -> Kernels:
        """The first kernels: a GPU's if they pass their test, or compiled kernels if these are already built."""
        if self._to_test is not None:
            fault = fault_of(self._to_test)
            if not fault:
                self.serving = self._to_test
            else:
                self._not_triton(f"their test on this model failed: {fault}")
        self.serving = self.built() or self.serving
        return self.serving

    def began(self, kernels: Kernels, note: str) -> None:
        """The first kernels serve. `note`: what does not serve, or is not packed, and why."""
        self._serve(kernels, note)
        log.info("kernels_chosen", serving=self.serving.name, building=self.waiting)

    def built(self) -> Kernels | None:
        """The kernels that follow the first kernels; None: not yet, or already returned. They are the compiled kernels
        once built and tested, or torch's kernels with packed weights if nothing can be built."""
        building = self._build
        if building is None or not building.done():
            return None
        self._build = None
        if (error := building.exception()) is not None:  # a failed build must not end the engine
            reason = str(error) if isinstance(error, CannotBuild) else f"{type(error).__name__}: {error}"
            log.info("kernels_not_compiled", serving=self.serving.name, reason=reason)
            self._policy.not_compiled(reason)
            return by_role(torch_back_end(packed=True))
        self._policy.compiled()
        return _with_torch(of_built(building.result()))

    def refused(self, fault: str) -> Kernels:
        """The compiled kernels cannot serve this model → the kernels that serve instead."""
        self._policy.refused(fault)
        log.warning("compiled_kernels_do_not_serve", reason=fault)
        return by_role(torch_back_end(packed=True))

    def changed(self, kernels: Kernels, note: str, *, seconds: float) -> None:
        """These kernels serve now. `seconds`: how long the change took, including requests in between."""
        self._serve(kernels, note)
        log.info("kernels_changed", serving=kernels.name, seconds=round(seconds, 3))

    def not_changed(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        log.error("kernels_not_changed", serving=self.serving.name, reason=reason, exc_info=error)
        self._policy.not_changed(reason)

    @property
    def state(self) -> KernelState:
        """For people"""
        return KernelState(self.serving.name, self._since, BEING_BUILT if self.waiting else self._policy.note)

    def _triton(self, device: torch.device, utilization_percent: int) -> Kernels | None:
        if not triton_is_here():
            self._not_triton("Triton is not installed. Install motet[gpu]")
            return None
        from motet_runner.execute.kernels.triton import computes_here, triton_back_end

        if not computes_here(device):
            self._not_triton(f"they compute on a GPU, and the device is {device}")
            return None
        return _with_torch(triton_back_end(device, int8=self._policy.int8, utilization_percent=utilization_percent))

    def _not_triton(self, reason: str) -> None:
        self._policy.not_triton(reason)
        log.warning("gpu_kernels_do_not_serve", serving=self.serving.name, reason=reason)

    def _serve(self, kernels: Kernels, note: str) -> None:
        self.serving = kernels
        self._since = time.time()
        self._policy.serve(note, compiled=kernels.compiled)


def _with_torch(back_end: BackEnd) -> Kernels:
    """Torch's back end fills the roles that `back_end` lacks."""
    return by_role(back_end, torch_back_end(packed=False))
