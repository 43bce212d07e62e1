"""What an iteration takes of a GPU's memory beside weights and pages."""

import torch

from motet.domain import pages_for
from motet.errors import SetupError
from motet_runner.execute.flat_batch import FlatBatchBuilder
from motet_runner.execute.model import LoadedModel
from motet_runner.execute.row_table import RowTable
from motet_runner.execute.trial import probe_row
from motet_runner.memory.out_of_memory import is_out_of_memory
from motet_runner.memory.paged import PagedStore
from motet_runner.plan import RowStep, StepPlan

LOGITS_COPIES = 3
"""As many tensors in float32 of the size of the logits does the sampler hold at once."""


def compute_largest_iteration(loaded: LoadedModel, prompt_tokens: int, decodes: int) -> torch.Tensor:
    """Compute a prompt's chunk beside decodes, all of which are sampled → logits"""
    lengths = [max(1, prompt_tokens), *([1] * decodes)]
    store = PagedStore(sum(map(pages_for, lengths)), loaded.shape, loaded.dtype, loaded.device)
    table = RowTable()
    builder = FlatBatchBuilder(table, store, loaded.device)
    steps, first = [], 0
    for row, length in enumerate(lengths):
        table.join(probe_row(row, [0] * length))
        pages = tuple(range(first, first + pages_for(length)))
        table.append_pages(RowStep(row, 0, 0, samples=False, new_pages=pages))
        steps.append(RowStep(row, 0, length, samples=True))
        first = pages[-1] + 1
    with torch.inference_mode():
        return loaded.forward(builder.build(StepPlan(number=0, prefills=tuple(steps))))


def activation_bytes(loaded: LoadedModel, prompt_tokens: int, decodes: int) -> int:
    """Of the largest iteration up to its logits, measured on the GPU. Its pages are counted, too: they are few."""
    before = torch.cuda.memory_allocated(loaded.device)
    torch.cuda.reset_peak_memory_stats(loaded.device)
    try:
        compute_largest_iteration(loaded, prompt_tokens, decodes)
        torch.cuda.synchronize(loaded.device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise SetupError(
            f"Beside the model's weights, the GPU has no room for the largest iteration, of {prompt_tokens} prompt "
            f"tokens and {decodes} decodes. Lower engine.prefillChunkTokens or engine.maxConcurrentSequences."
        ) from error
    peak = torch.cuda.max_memory_allocated(loaded.device) - before
    torch.cuda.empty_cache()
    return peak


def sampler_bytes(loaded: LoadedModel, rows: int) -> int:
    return LOGITS_COPIES * rows * loaded.vocabulary * torch.float32.itemsize
