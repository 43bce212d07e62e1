"""Decides the contents of iterations and the owners of memory, without a device.

Pure: no torch, no sockets, no clock. The engine drives it with tensors, the simulator without.
"""

from motet_runner.plan.composer import Iteration, compose
from motet_runner.plan.device_budget import DeviceBudget
from motet_runner.plan.host_adapters import HostAdapters
from motet_runner.plan.length_rope import LengthRope
from motet_runner.plan.page_copies import Copy, Tier
from motet_runner.plan.pages import PageAllocator
from motet_runner.plan.planner import Planner
from motet_runner.plan.presets import NOT_YET, PRESETS, Preset, preset_named
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.size_limit import SizeLimit
from motet_runner.plan.step_plan import (
    AdapterLoad,
    DecodeRows,
    HostCopy,
    LoadArrived,
    LoadedContents,
    LoadFailed,
    ProofResult,
    ProofStep,
    RowJoin,
    RowStep,
    StepPlan,
    StepResult,
)

__all__ = [
    "NOT_YET",
    "PRESETS",
    "AdapterLoad",
    "Copy",
    "DecodeRows",
    "DeviceBudget",
    "HostAdapters",
    "HostCopy",
    "Iteration",
    "LengthRope",
    "LoadArrived",
    "LoadFailed",
    "LoadedContents",
    "PageAllocator",
    "Planner",
    "Preset",
    "ProofResult",
    "ProofStep",
    "RowJoin",
    "RowStep",
    "Sequence",
    "SizeLimit",
    "StepPlan",
    "StepResult",
    "Tier",
    "compose",
    "preset_named",
]
