"""The forward pass of any decoder in C++, with attention and LoRA, in one call (PU-21, OR-05, OR-17).

A program is a list of steps over the rows of an iteration. This module cuts the list into stages. A value that only one
stage of rows needs is in a thread's memory; all other values are in buffers.
"""

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from motet_kernels.cpp.attention import AttentionBatch, no_attention
from motet_kernels.cpp.library import TYPES, Library
from motet_kernels.cpp.lora_backend import LINEARS_AT_ONCE, CppBackend, CppBatch
from motet_kernels.cpp.program_structures import (
    NUMBER,
    Buffer,
    Call,
    Instruction,
    LinearStep,
    Operand,
    Program,
    Stage,
)
from motet_kernels.cpp.steps import (
    DIMENSIONS,
    MAX_INPUTS,
    NUMBER_TYPES,
    OPERATIONS,
    Attend,
    ByPosition,
    Compute,
    Multiply,
    Place,
    Step,
    Value,
    needed,
    values_of,
)
from motet_kernels.positions import more_positions

KINDS = ("linears", "rows", "attention", "choice")
"""The kinds of stages; the library measures the time of each kind."""
_LINEARS, _ROWS, _ATTENTION = range(3)
_BUFFER, _SCRATCH, _CONSTANT = range(3)
_ALIGNED = 64


@dataclass
class _StageSteps:
    kind: int
    kept: bool
    steps: list[Any] = field(default_factory=list)


class CompiledProgram:
    """The steps from the values `tokens` and `positions` to `logits`."""

    def __init__(
        self,
        library: Library,
        steps: Sequence[Step],
        *,
        tokens: Value,
        positions: Value,
        logits: Value,
        prefetches: bool = True,
    ) -> None:
        """`prefetches`: linears prefetch what their adapters read."""
        self._library = library
        self._prefetches = prefetches
        self._logits = logits
        self.seconds: npt.NDArray[np.float64] | None = None
        """The time per kind of stage, if it is measured"""
        self._stages = _cut(needed(steps, logits))
        self.layers = sum(stage.kind == _ATTENTION for stage in self._stages)
        self._constants: list[Any] = []
        """What the library has only addresses of; the list keeps it alive."""
        self._zero, self._one = torch.zeros(1, dtype=torch.float32), torch.ones(1, dtype=torch.float32)
        self._scratch: dict[Value, int] = {}
        self._scratch_bytes = 0
        self._buffers: dict[Value, int] = {tokens: 0, positions: 1, logits: 2}
        self._row_bytes = [value.row_bytes for value in self._buffers]
        self._given = len(self._buffers)
        """How many buffers get another address in each call: tokens, positions, logits"""
        self._place_values()
        self._room = 0
        """For how many rows the buffers have room"""
        self._memory: list[torch.Tensor] = []
        self._of_buffer = (Buffer * len(self._row_bytes))(*(Buffer(None, size) for size in self._row_bytes))
        self._paths: list[str] = []
        self._looks_up: dict[ByPosition, list[int]] = {}
        """Table → the indices of the instructions that read it"""
        self._tables: list[torch.Tensor] = []
        self._tabled = 0
        """How many positions the tables have"""
        self._assemble()

    def use_lora(self, backend: CppBackend) -> None:
        """Sets the back end that adds LoRA to the linears. Before this call, no batch may have LoRA."""
        for linear, path in zip(self._of_linear, self._paths, strict=True):
            linear.lora = backend.index_of(path)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor,
        *,
        attention: AttentionBatch,
        lora: CppBatch | None,
        longest: int = 0,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [kept rows, vocabulary] of the rows `keep`.

        `longest`: larger than each position; needed only by a program with a table by position. `chosen` [kept rows]
        int64 gets the token of each row's largest logit: -1 if the largest is infinite or any logit is NaN.
        """
        rows = tokens.numel()
        self._make_room(rows)
        if longest > self._tabled and self._looks_up:
            self._tabulate(more_positions(self._tabled, longest))
        logits = torch.empty((keep.numel(), self._logits.size), dtype=self._logits.dtype)
        for number, tensor in enumerate((tokens, positions, logits)):
            self._of_buffer[number].data = tensor.data_ptr()
        call = Call(
            rows=rows,
            kept=keep.numel(),
            threads=torch.get_num_threads(),
            keep=keep.data_ptr(),
            attention=attention.address,
            chosen=None if chosen is None else chosen.data_ptr(),
            seconds=None if self.seconds is None else self.seconds.ctypes.data,
        )
        if lora is not None and lora.count:
            call.lora, call.lora_count, call.lora_products = lora.address, lora.count, lora.products_address
        if not self._library.program_pass(ctypes.addressof(self._program), ctypes.addressof(call)):
            raise IndexError("a token or a position is out of the model's range")
        return logits

    def _make_room(self, rows: int) -> None:
        """Gives the buffers room for at least this number of rows."""
        if rows <= self._room:
            return
        room = max(rows, 2 * self._room)
        buffers = [torch.empty(room * size, dtype=torch.uint8) for size in self._row_bytes[self._given :]]
        # Any allocation may fail, so pointers are set only after all have succeeded.
        for number, buffer in enumerate(buffers, self._given):
            self._of_buffer[number].data = buffer.data_ptr()
        self._memory, self._room = buffers, room

    def _tabulate(self, positions: int) -> None:
        tables = [_table_of(self._library, by_position, positions) for by_position in self._looks_up]
        for table, numbers in zip(tables, self._looks_up.values(), strict=True):
            for number in numbers:
                self._instructions[number].inputs[0].base = table.data_ptr()
                self._instructions[number].number = positions
        self._tables, self._tabled = tables, positions

    def _place_values(self) -> None:
        """Places values in buffers or in a thread's memory. Values that are not needed at the same time may share a
        place."""
        first, last = dict[Value, int](), dict[Value, int]()
        for number, stage in enumerate(self._stages):
            for value in values_of(stage.steps):
                first.setdefault(value, number)
                last[value] = number
        free: dict[int, list[int]] = {}
        for number, stage in enumerate(self._stages):
            values = dict.fromkeys(values_of(stage.steps))
            for value in values:
                lasts = first[value] < last[value] or stage.kind != _ROWS
                if lasts and first[value] == number and value not in self._buffers:
                    self._buffers[value] = self._reused(free, value)
            for value in values:
                if value in self._buffers and last[value] == number and self._buffers[value] >= self._given:
                    free.setdefault(value.row_bytes, []).append(self._buffers[value])
            self._place_in_scratch(stage.steps)

    def _reused(self, free: dict[int, list[int]], value: Value) -> int:
        if same := free.get(value.row_bytes):
            return same.pop()
        self._row_bytes.append(value.row_bytes)
        return len(self._row_bytes) - 1

    def _place_in_scratch(self, steps: Sequence[Step]) -> None:
        last = {value: number for number, step in enumerate(steps) for value in values_of([step])}
        free: dict[int, list[int]] = defaultdict(list)
        end = 0
        for number, step in enumerate(steps):
            sizes = {value: -(-value.row_bytes // _ALIGNED) * _ALIGNED for value in values_of([step])}
            of_step = {value: size for value, size in sizes.items() if value not in self._buffers}
            for value, size in of_step.items():
                if value not in self._scratch:
                    self._scratch[value] = free[size].pop() if free[size] else end
                    end = max(end, self._scratch[value] + size)
            for value, size in of_step.items():
                if last[value] == number:
                    free[size].append(self._scratch[value])
        self._scratch_bytes = max(self._scratch_bytes, end)

    def _assemble(self) -> None:
        instructions: list[Instruction] = []
        linears: list[LinearStep] = []
        stages: list[Stage] = []
        for stage in self._stages:
            for number, step in enumerate(stage.steps, len(instructions)):
                if isinstance(step, Compute) and isinstance(step.inputs[0].of, ByPosition):
                    self._looks_up.setdefault(step.inputs[0].of, []).append(number)
            if stage.kind == _ATTENTION:
                stages.append(self._attention(stage.steps[0]))
                continue
            steps: list[Any] = instructions if stage.kind == _ROWS else linears
            stages.append(Stage(kind=stage.kind, kept=stage.kept, first=len(steps), count=len(stage.steps)))
            steps += map(self._instruction if stage.kind == _ROWS else self._linear, stage.steps)
        self._of_stage = (Stage * len(stages))(*stages)
        self._instructions = (Instruction * len(instructions))(*instructions)
        self._of_linear = (LinearStep * len(linears))(*linears)
        every = (step for stage in self._stages for step in stage.steps)
        dtype = next((step.weights.dtype for step in every if isinstance(step, Multiply)), self._logits.dtype)
        self._program = Program(
            type=TYPES[dtype],
            prefetches=self._prefetches,
            type_of_logits=NUMBER_TYPES.index(self._logits.dtype),
            stages=len(stages),
            scratch_bytes=self._scratch_bytes,
            of_stage=ctypes.addressof(self._of_stage),
            instructions=ctypes.addressof(self._instructions),
            linears=ctypes.addressof(self._of_linear),
            buffers=ctypes.addressof(self._of_buffer),
        )

    def _attention(self, step: Attend) -> Stage:
        assert isinstance(step.query.of, Value)
        return Stage(
            kind=_ATTENTION,
            first=step.layer,
            query=self._buffers[step.query.of],
            query_offset=step.query.offset,
            head_stride=step.query.strides[1],
            heads=step.heads,
            out=self._buffers[step.out],
            window=step.window or 0,
            scale=step.scale,
            softcap=step.softcap or 0.0,
        )

    def _linear(self, step: Multiply) -> LinearStep:
        self._paths.append(step.path)
        self._constants += [step.weights, step.bias]
        return LinearStep(
            x=self._buffers[step.x],
            x_offset=step.offset,
            y=self._buffers[step.y],
            inputs=step.weights.inputs,
            outputs=step.weights.outputs[step.index],
            packed=step.weights.address_of(step.index),
            bias=None if step.bias is None else step.bias.data_ptr(),
            lora=-1,
        )

    def _instruction(self, step: Compute) -> Instruction:
        zero = Place(self._zero)
        nothing = (
            zero,
            Place(self._one),
            zero,
            zero,
            zero,
        )  # for missing inputs: a norm's weight is one, its bias zero
        inputs = (*step.inputs, *nothing[len(step.inputs) :])
        return Instruction(
            operation=OPERATIONS.index(step.operation),
            sizes=(NUMBER * DIMENSIONS)(*step.sizes),
            out=self._operand(step.out or zero),
            inputs=(Operand * MAX_INPUTS)(*map(self._operand, inputs)),
            also=self._operand(step.also or zero),
            number=step.number,
            real=step.real,
        )

    def _operand(self, place: Place) -> Operand:
        of = place.of
        if isinstance(of, Value):
            dtype, where = of.dtype, _BUFFER if of in self._buffers else _SCRATCH
            base = self._buffers[of] if of in self._buffers else self._scratch[of]
        else:
            self._constants.append(of)
            where, dtype = _CONSTANT, of.dtype
            base = of.data_ptr() if isinstance(of, torch.Tensor) else of.address
        strides = (NUMBER * DIMENSIONS)(*place.strides)
        return Operand(where=where, base=base, offset=place.offset, type=NUMBER_TYPES.index(dtype), strides=strides)


def _table_of(library: Library, by_position: ByPosition, positions: int) -> torch.Tensor:
    """[positions, numbers] computed by the table's steps"""
    result = by_position.result
    logits, whole = Value(result.size, result.dtype, kept=True), (0, 0, 1)
    keep = Compute("keep", (1, 1, result.size), Place(logits, whole), (Place(result, whole),))
    steps, given = [*by_position.steps, keep], Value(1, torch.int64)
    program = CompiledProgram(library, steps, tokens=given, positions=by_position.positions, logits=logits)
    every = torch.arange(positions)
    return program(every, every, every, attention=no_attention(library), lora=None)


def _cut(steps: Sequence[Step]) -> list[_StageSteps]:
    """Cuts the steps into stages of three kinds: at most LINEARS_AT_ONCE linears that read the same numbers; one
    attention; the steps between two such stages. Steps of kept rows have stages of their own."""
    stages: list[_StageSteps] = []
    waiting = dict(zip(count(), steps, strict=False))
    for number, step in enumerate(steps):
        if number not in waiting:
            continue
        if isinstance(step, Multiply):
            same = [
                other
                for other, later in waiting.items()
                if isinstance(later, Multiply) and (later.x, later.offset) == (step.x, step.offset)
            ][:LINEARS_AT_ONCE]
            _end_linears(stages)
            stages.append(_StageSteps(_LINEARS, step.y.kept, [waiting.pop(other) for other in same]))
            continue
        del waiting[number]
        if isinstance(step, Attend):
            _end_linears(stages)
            stages.append(_StageSteps(_ATTENTION, kept=False, steps=[step]))
            continue
        kept = step.out is not None and isinstance(step.out.of, Value) and step.out.of.kept
        if kept:
            _end_linears(stages)
        if not stages or (stages[-1].kind, stages[-1].kept) != (_ROWS, kept):
            stages.append(_StageSteps(_ROWS, kept))
        stages[-1].steps.append(step)
    return stages


def _end_linears(stages: list[_StageSteps]) -> None:
    """After a stage of linears, the next stage of rows completes LoRA. If no other one follows, add an empty one."""
    if stages and stages[-1].kind == _LINEARS and not stages[-1].kept:
        stages.append(_StageSteps(_ROWS, kept=False))
