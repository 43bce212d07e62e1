"""What an iteration is made of and whose memory it may touch, decided without a device.

Pure: no torch, no sockets, no clock. The engine drives it with tensors, the simulator without.
"""

from motet_runner.plan.composer import Iteration, Work, compose
from motet_runner.plan.copies import Copy, Effect, Tier, Wipe
from motet_runner.plan.device_budget import AdapterRun, DeviceBudget, Grant, Reclaimed
from motet_runner.plan.length_rope import LengthRope
from motet_runner.plan.pages import PageAllocator
from motet_runner.plan.planner import Planner
from motet_runner.plan.presets import NOT_YET, PRESETS, Preset, preset_named
from motet_runner.plan.resident_adapters import ResidentAdapters
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.size_limit import SizeLimit
from motet_runner.plan.step_plan import (
    AdapterLoad,
    DecodeRows,
    LoadArrived,
    LoadFailed,
    RowJoin,
    RowStep,
    StepPlan,
    StepResult,
)

__all__ = [
    "NOT_YET",
    "PRESETS",
    "AdapterLoad",
    "AdapterRun",
    "Copy",
    "DecodeRows",
    "DeviceBudget",
    "Effect",
    "Grant",
    "Iteration",
    "LengthRope",
    "LoadArrived",
    "LoadFailed",
    "PageAllocator",
    "Planner",
    "Preset",
    "Reclaimed",
    "ResidentAdapters",
    "RowJoin",
    "RowStep",
    "Sequence",
    "SizeLimit",
    "StepPlan",
    "StepResult",
    "Tier",
    "Wipe",
    "Work",
    "compose",
    "preset_named",
]
