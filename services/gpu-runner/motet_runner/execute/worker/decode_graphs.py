"""Decode-only iterations, captured as graphs for a few numbers of rows (PU-22, OR-14).

A graph depends on the number of rows alone. Tensors say which rows they are, and which lengths, pages and adapters they
have, so a change of these needs no new graph. Rows up to the next captured number are padding: they have no keys, no
adapter and no page.

For adapters that scale the linears' own results there are other graphs, which launch more kernels. They are captured
when they are first needed: most engines have no such adapter.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import structlog
import torch

from motet_kernels import Segment
from motet_runner.execute.batch.flat_batch import AttentionOverPages, FlatBatch, Line, PagedRows
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.sample.device_sampler import largest_tokens
from motet_runner.execute.worker.captured_graph import Capture, NotCaptured
from motet_runner.execute.worker.device_rows import NOBODY, DeviceRows
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.memory.paged import PagedStore

log = structlog.get_logger(__name__)

_SMALL = (1, 2, 4)
_STEP = 8


@runtime_checkable
class FixedAttention(AttentionOverPages, Protocol):
    """Attention whose batches can be filled on the device, such as `motet_kernels.gpu.attention.GpuAttention`"""

    def fixed_batch(self, max_rows: int, *, table: torch.Tensor) -> Any: ...

    def refill(self, batch: Any, lengths: torch.Tensor, *, table_rows: torch.Tensor) -> None: ...


@runtime_checkable
class FixedLora(Protocol):
    """A back end of add_lora whose batches can be refilled, such as `motet_kernels.gpu.lora_backend.GpuBackend`"""

    def fixed_batch(self, max_rows: int) -> Any: ...

    def that_scales(self, batch: Any) -> Any: ...

    def fill(self, batch: Any, segments: Sequence[Segment]) -> None: ...


def captured_sizes(most: int) -> list[int]:
    """The numbers of rows that are captured, for iterations of at most `most` rows"""
    rounded = -(-most // _STEP) * _STEP if most > max(_SMALL) else most
    return [size for size in (*_SMALL, *range(_STEP, rounded + 1, _STEP)) if size <= rounded] or [1]


@dataclass(slots=True)
class CapturedGraph:
    """The graph for one number of rows"""

    rows: torch.Tensor
    """[size] int64, rows as DeviceRows numbers them"""
    batch: FlatBatch
    chosen: torch.Tensor
    """[size] The token of each row's largest logit"""
    replay: Callable[[], None] | None = None
    calls: int = 0
    """The attention calls of one pass"""
    numbers: tuple[int, ...] = ()
    """The same rows as `rows`, by their numbers in the table"""

    def fill(self, numbers: tuple[int, ...], rows: torch.Tensor) -> None:
        """`rows` [size]: rows as DeviceRows numbers them; `numbers`: the host's numbers of the same rows"""
        self.numbers = ()
        self.rows.copy_(rows)
        self.numbers = numbers


class DecodeGraphs:
    def __init__(  # noqa: PLR0917 what a pass reads
        self,
        loaded: LoadedModel,
        store: PagedStore,
        rows: DeviceRows,
        capture: Capture,
        attention: FixedAttention,
        backend: FixedLora | None,
        *,
        most: int,
        longest: int,
    ) -> None:
        """`most`: rows of an iteration; `longest`: tokens of a sequence"""
        self.loaded = loaded
        self._store = store
        self._rows = rows
        self._capture = capture
        self._attention = attention
        self._backend = backend
        self._longest = longest
        self._graphs: dict[int, CapturedGraph] = {}
        self._scaling: dict[int, CapturedGraph | None] = {}
        """Those for adapters that scale; None: it could not be captured"""
        self._logits: torch.Tensor | None = None
        """[most rows, vocabulary] Shared by all graphs, to save memory"""
        self.captures = 0
        sizes = captured_sizes(most)
        self._lora = None if backend is None else backend.fixed_batch(max(sizes))
        self._that_scales = None if backend is None else backend.that_scales(self._lora)
        """The same memory, shared by all graphs: a smaller graph reads the first rows"""
        self._adapters: object = None
        """The `adapters` for which `_lora` was filled"""
        self._capture_all(sizes)
        self._sizes = sorted(self._graphs)

    def graph_for(self, rows: int, *, scales: bool = False) -> CapturedGraph | None:
        """The smallest graph with at least `rows` rows; None: none is large enough. `scales`: an adapter scales the
        linears' own results."""
        at = bisect_left(self._sizes, rows)
        if at == len(self._sizes):
            return None
        size = self._sizes[at]
        if not scales:
            return self._graphs[size]
        if size not in self._scaling:
            if self._backend is not None:  # a capture computes, and the last iteration may have had more rows
                self._adapters = None
                self._backend.fill(self._that_scales, [])
            self._scaling[size] = self._captured(size, self._that_scales)[0]
        return self._scaling[size]

    def fill_adapters(self, adapters: object, segments: Callable[[], Sequence[Segment]]) -> None:
        """`adapters`: a key. Equal keys have equal segments."""
        if self._backend is not None and self._adapters != adapters:
            self._adapters = None
            self._backend.fill(self._that_scales, segments())
            self._adapters = adapters

    def replay(self, graph: CapturedGraph) -> torch.Tensor:
        """→ logits [size, vocabulary]. Logits and chosen tokens are valid until the next replay. Each row's chosen
        token becomes its newest token."""
        assert graph.replay is not None
        graph.replay()
        assert self._logits is not None
        return self._logits[: len(graph.rows)]

    def undo(self, graph: CapturedGraph) -> None:
        """Restores the rows' newest tokens from before the last replay."""
        self._rows.newest.index_copy_(0, graph.rows, graph.batch.input_ids[0])
        self._rows.before.index_copy_(0, graph.rows, graph.batch.positions[0])

    def _capture_all(self, sizes: Sequence[int]) -> None:
        """Captures the largest graph first: the memory that it frees suffices for the others."""
        for size in sorted(sizes, reverse=True):
            graph, for_memory = self._captured(size, self._lora)
            if graph is not None:
                self._graphs[size] = graph
            elif not for_memory:  # smaller graphs would fail as well
                break
        log.info("decodes_recorded", rows=sorted(self._graphs))

    def _captured(self, size: int, lora: Any) -> tuple[CapturedGraph | None, bool]:
        """None if it could not be captured, and whether that was for memory"""
        try:
            return self._capture_graph(size, lora), False
        except NotCaptured as error:
            _warn(size, str(error))
            return None, error.for_memory
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            _warn(size, str(error).strip().partition("\n")[0])
            return None, True

    def _capture_graph(self, size: int, lora: Any) -> CapturedGraph:
        device = self.loaded.device
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        attended = self._attention.fixed_batch(size, table=self._rows.pages)
        batch = FlatBatch(
            store=self._store,
            input_ids=zeros.clone()[None],
            positions=zeros.clone()[None],
            keep=torch.arange(size, device=device),
            sampled=[],
            scored=[],
            begun=[],
            lora=lora,
            tokens=size,
            longest=self._longest,
            line=Line([], np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)),
            choices=zeros.clone(),
            paged=PagedRows(self._attention, attended),
        )
        graph = CapturedGraph(zeros, batch, zeros.clone())
        graph.replay = self._capture(lambda: self._compute(graph))
        self.captures += 1
        return graph

    def _compute(self, graph: CapturedGraph) -> None:
        """The pass that is captured. All that differs between replays is in tensors."""
        batch, rows, here = graph.batch, graph.rows, self._rows
        is_one = rows != NOBODY
        batch.input_ids[0].copy_(here.newest.index_select(0, rows))
        batch.positions[0].copy_(here.before.index_select(0, rows))
        lengths = torch.where(is_one, batch.positions[0] + 1, 0).int()
        self._attention.refill(batch.paged.batch, lengths, table_rows=rows.int())  # type: ignore[union-attr] # is there
        batch.calls, batch.chosen = 0, None
        logits = self.loaded.forward(batch)
        graph.calls = batch.calls
        if self._logits is None:  # in the first call of the largest graph
            self._logits = torch.empty_like(logits)
        self._logits[: len(rows)].copy_(logits)
        graph.chosen.copy_(largest_tokens(logits) if batch.chosen is None else batch.chosen)
        here.newest.index_copy_(0, rows, torch.where(is_one, graph.chosen.clamp(min=0), 0))
        here.before.index_copy_(0, rows, batch.positions[0] + is_one)


def _warn(rows: int, reason: str) -> None:
    effect = "iterations that no recorded graph serves are launched kernel by kernel, which is slower"
    log.warning("decodes_not_recorded", rows=rows, reason=reason, effect=effect)
