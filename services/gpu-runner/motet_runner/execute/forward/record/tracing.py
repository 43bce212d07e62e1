"""Records what a model's modules compute for each row of an iteration, as steps of a program for the compiled kernels.
This works for any family.

Only attention mixes rows: `load/model_check.py` verifies that. So everything else is a list of operations on the
numbers of a row. The rows are found by the size of their dimension: no other dimension has that size. Tensors that do
not depend on the rows are constants. An operation that is unknown here, or that mixes rows, makes its result unknown;
the recording fails if the logits depend on such a result, or if the control flow depends on values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, masking_utils

from motet_kernels.cpp.steps import Attend, Compute, Step, Value
from motet_runner.execute.batch.flat_batch import FlatBatch, PagedRows
from motet_runner.execute.forward.record.row_handlers import record
from motet_runner.execute.forward.record.row_trace import OwnWeight, RowTrace
from motet_runner.execute.forward.record.row_views import CannotRecord, View, tensors_in
from motet_runner.execute.forward.record.unpacked_steps import LinearOf, LookUpOf
from motet_runner.execute.pack.linear_packing import HEAD, Packed, weight_of


class Tracing(TorchDispatchMode):
    def __init__(self, trace: RowTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.trace = trace
        self._refused = ""

    # -- the model's inputs and outputs --------------------------------------------------------------------------------

    def run(self, batch: FlatBatch, forward: Callable[[FlatBatch], torch.Tensor]) -> Value:
        """Records an iteration with the trace's numbers of rows → its logits."""
        trace = self.trace
        trace.keep = batch.keep
        for tensor, value in ((batch.input_ids, trace.tokens), (batch.positions, trace.positions)):
            trace.know(tensor, View(value, trace.rows.laid_out(tensor.shape, kept=False)))
        batch.paged = PagedRows(self, None)  # type: ignore[arg-type] # replaces attention over pages
        with _without_masks(), self:
            logits = forward(batch)
        if self._refused:
            raise CannotRecord(self._refused)
        view = trace.view(logits)
        if tuple(logits.shape) != (trace.rows.kept, view.value.size):
            raise CannotRecord(f"the logits are {tuple(logits.shape)}")
        return trace.together(view).value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        _batch: object,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Records attention → [rows, heads, width] zeros in place of results"""
        trace, (heads, _, width) = self.trace, query.shape
        out = torch.zeros((trace.rows.all, heads, width), dtype=query.dtype)
        try:
            places = [trace.of_heads(tensor) for tensor in (query, key, value)]
            trace.steps.append(Compute("write", (1, key.shape[0], width), None, (places[1], places[2]), layer))
            view = trace.new(out.shape, out.dtype)
            trace.steps.append(Attend(layer, places[0], view.value, heads, scale, window, softcap))
            trace.know(out, view)
        except CannotRecord as error:
            trace.forget(out, str(error))
        return out

    def program(self, packed: dict[str, Packed], biases: dict[str, torch.Tensor | None]) -> list[Step]:
        """The steps, with the packed weights."""
        return [step.with_weights(packed, biases) if isinstance(step, LinearOf | LookUpOf) else step
                for step in self.trace.steps]  # fmt: skip

    # -- what the modules do -------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = [tensor for tensor in tensors_in((args, kwargs)) if self.trace.depends_on_rows(tensor)]
        if given:
            name = function.overloadpacket.__name__
            outputs = list(tensors_in(result))
            if not outputs:
                self._refuse(f"it looks at numbers of rows ({name})")
            elif function._schema.is_mutable:  # noqa: SLF001 - torch has no public name for it
                self._refuse(f"it changes numbers in place ({name})")
            try:
                self.trace.check_known(given)
                record(self.trace, name, args, kwargs, result)
            except Exception as error:  # the modules can still serve
                why = str(error) if isinstance(error, CannotRecord) else f"{name}: {error}"
                for output in outputs:
                    self.trace.forget(output, why)
        return result

    def _refuse(self, why: str) -> None:
        self._refused = self._refused or why


def weights_by_address(model: Any, linears: dict[str, nn.Module]) -> dict[int, OwnWeight]:
    """Address → the weight, for a RowTrace."""
    head = model.get_output_embeddings()
    weights = {path: weight_of(module) for path, module in linears.items()}
    if head is not None:
        weights[HEAD] = head.weight
    return {weight.data_ptr(): OwnWeight(path, weight.shape, weight.stride()) for path, weight in weights.items()}


@contextmanager
def _without_masks() -> Iterator[None]:
    """Our attention needs no masks, and the batch has no padding. Otherwise transformers reads positions to choose a
    mask, and tokens to warn of padding."""
    nothing = (
        (masking_utils, "find_packed_sequence_indices"),
        (PreTrainedModel, "warn_if_padding_and_no_attention_mask"),
    )
    found = [getattr(owner, name) for owner, name in nothing]
    for owner, name in nothing:
        setattr(owner, name, lambda *_: None)
    try:
        yield
    finally:
        for (owner, name), function in zip(nothing, found, strict=True):
            setattr(owner, name, function)
