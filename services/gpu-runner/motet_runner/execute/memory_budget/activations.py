"""The GPU memory of an iteration, without weights and pages."""

import torch

from motet.errors import SetupError
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.trial import Trial
from motet_runner.memory.out_of_memory import is_out_of_memory

LOGITS_COPIES = 3
"""How many float32 tensors of the logits' size the sampler holds at once"""


def compute_largest_iteration(loaded: LoadedModel, prompt_tokens: int, decodes: int) -> torch.Tensor:
    """Compute a prompt's chunk together with decodes → the logits of each sequence's last token"""
    lengths = [max(1, prompt_tokens), *([1] * decodes)]
    trial = Trial(loaded, [[0] * length for length in lengths])
    with torch.inference_mode():
        return loaded.forward(trial.batch(dict(enumerate(lengths)), every_token=False))


def activation_bytes(loaded: LoadedModel, prompt_tokens: int, decodes: int) -> int:
    """The largest iteration's bytes, up to its logits and including its few pages, measured on the GPU."""
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
