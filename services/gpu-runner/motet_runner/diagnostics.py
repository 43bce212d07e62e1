"""The parts of an engine, for benchmarks and tests that inspect them and watch their calls."""

from dataclasses import dataclass
from typing import Any

from motet_kernels import LoraBackend
from motet_runner.execute.adapters.lora_linears import LoraLinears
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.kernels.kernel_change import KernelChange
from motet_runner.execute.kernels.kernel_choice import KernelChoice
from motet_runner.execute.worker.device_worker import DeviceWorker
from motet_runner.execute.worker.local_worker import LocalWorker
from motet_runner.interface import EngineConfig
from motet_runner.memory.paged import PagedStore
from motet_runner.plan import Planner


@dataclass(frozen=True, slots=True)
class Diagnostics:
    config: EngineConfig
    """With exact mode's changes, if the engine is in exact mode"""
    loaded: LoadedModel
    linears: LoraLinears
    kernel_choice: KernelChoice
    kernel_change: KernelChange
    backend: LoraBackend[Any]
    """The back end that serves now"""
    store: PagedStore
    planner: Planner
    worker: LocalWorker | DeviceWorker
