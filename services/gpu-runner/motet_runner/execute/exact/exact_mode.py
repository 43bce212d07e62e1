"""Exact mode's limits, and the trial that shows whether it can keep its promise with a model.

Exact mode (`tiles.py`) promises that the logits of a token depend only on the tokens before it, the adapter and the
position, to the last bit. A model whose modules mix the tokens of a tile cannot keep this promise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from motet.domain import PAGE_TOKENS, pages_for
from motet.errors import ModelFolderError, SetupError
from motet_kernels import TILE_ROWS
from motet_runner.execute.adapters.lora_linears import features
from motet_runner.execute.batch.row_table import RowTable
from motet_runner.execute.exact.tiles import TileBuilder, tiles
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.one_thread import one_thread
from motet_runner.execute.forward.trial import join_texts, text
from motet_runner.interface import EngineConfig
from motet_runner.memory.paged import PagedStore
from motet_runner.plan import RowStep, StepPlan

NAME = "exact"
"""Its name in `engine.kernels`"""

WIDTH = 16
"""The numbers in a CPU's widest vector. If a layer's width is not a multiple of it, other code computes the last
numbers of a row or the first numbers of the next row."""


def exact_settings(config: EngineConfig) -> EngineConfig:
    """The settings that exact mode needs. Raises SetupError for settings that contradict them."""
    if config.dtype not in ("auto", "float32"):
        raise SetupError(f"engine.kernels is exact, which computes in float32, and engine.dtype is {config.dtype}.")
    if config.threads not in (None, 1):
        raise SetupError(
            f"engine.kernels is exact, which computes with one thread, and engine.threads is {config.threads}."
        )
    return replace(config, dtype="float32", threads=1)


def check_model(loaded: LoadedModel) -> None:
    """Raises ModelFolderError if exact mode cannot serve the model."""
    reason = _reason_by_config(loaded)
    if reason is None:
        with torch.inference_mode(), one_thread():
            reason = _reason_by_trial(loaded)
    if reason is not None:
        raise ModelFolderError(f"engine.kernels is exact, and {loaded.architecture} {reason}. Choose other kernels.")


def _reason_by_config(loaded: LoadedModel) -> str | None:
    if loaded.rope is not None:
        return "has a rope whose frequencies depend on the length of the sequence"
    widths = {"head_dim": loaded.shape.head_dim}
    for path, module in loaded.model.named_modules():
        shape = features(module)
        if shape is not None and module is not loaded.model.get_output_embeddings():
            widths |= {f"{path}, inputs": shape[0], f"{path}, outputs": shape[1]}
    for name, width in widths.items():
        if width % WIDTH:
            return f"has a width that is not a multiple of {WIDTH} ({name}: {width})"
    return None


def _reason_by_trial(loaded: LoadedModel) -> str | None:
    """Computes the same tokens with different neighbours and in different places of their tiles."""
    lengths = {0: TILE_ROWS + 5, 1: 6, 2: 1, 3: TILE_ROWS}
    texts = {
        row: text(length, stride=7, first=11 * row + 3, vocabulary=loaded.vocabulary) for row, length in lengths.items()
    }
    expected = {
        row: _logits(loaded, {row: tokens}, [[RowStep(row, 0, len(tokens), samples=True)]])[row]
        for row, tokens in texts.items()
    }
    for way, plans in _ways(lengths):
        found = _logits(loaded, texts, plans)
        if not all(torch.equal(found[row], logits) for row, logits in expected.items()):
            return f"gives other logits when a sequence is computed {way}: its modules compute several tokens together"
    return None


def _ways(lengths: Mapping[int, int]) -> Iterator[tuple[str, list[list[RowStep]]]]:
    at_once = [RowStep(row, 0, length, samples=True) for row, length in lengths.items()]
    yield "beside others", [at_once]
    yield "in another place", [at_once[::-1]]
    first = [RowStep(row, 0, length // 2, samples=False) for row, length in lengths.items() if length > 1]
    then = [RowStep(row, length // 2, length - length // 2, samples=True) for row, length in lengths.items()]
    yield "in two parts", [first, then]


def _logits(
    loaded: LoadedModel, texts: Mapping[int, Sequence[int]], plans: Sequence[Sequence[RowStep]]
) -> dict[int, torch.Tensor]:
    """The last logits of each sequence."""
    store = PagedStore(
        sum(pages_for(len(tokens), PAGE_TOKENS) for tokens in texts.values()), loaded.shape, loaded.dtype, loaded.device
    )
    table = RowTable()
    builder = TileBuilder(table, store, loaded.device)
    join_texts(table, texts, {}, {})
    found: dict[int, torch.Tensor] = {}
    for steps in plans:
        for tile in tiles(StepPlan(number=0, prefills=tuple(steps))):
            batch = builder.build(tile)
            logits = loaded.forward(batch)
            found |= {row.number: of_row for row, of_row in zip(batch.sampled, logits, strict=True)}
    return found
