"""What an iteration takes of a GPU's memory beside weights and pages. It is measured first: pages get what is left."""

import torch

from motet.domain import pages_for
from motet_runner.execute.flat_batch import FlatBatchBuilder
from motet_runner.execute.model import LoadedModel, probe_row
from motet_runner.execute.row_table import RowTable
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
    """Of the largest iteration, measured on the GPU. Its pages are counted, too: they are few."""
    before = torch.cuda.memory_allocated(loaded.device)
    torch.cuda.reset_peak_memory_stats(loaded.device)
    logits = compute_largest_iteration(loaded, prompt_tokens, decodes)
    of_sampler = LOGITS_COPIES * logits.numel() * torch.float32.itemsize
    del logits
    torch.cuda.synchronize(loaded.device)
    peak = torch.cuda.max_memory_allocated(loaded.device) - before
    torch.cuda.empty_cache()
    return peak + of_sampler


def recorded_bytes(loaded: LoadedModel, decodes: int) -> int:
    """Of recorded decodes, beside that: they keep what lies between the layers of the largest one, and its logits."""
    return activation_bytes(loaded, 1, decodes)
