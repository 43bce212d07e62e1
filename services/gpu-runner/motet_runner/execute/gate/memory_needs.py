"""The memory that the gate takes, and whether this memory is available."""

from motet.domain import PAGE_TOKENS, pages_for
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.gate.texts import CROWD, PARTS, SOME, TOKENS, far_position
from motet_runner.memory.host_limit import available_host_bytes

LOGIT_BYTES = 16
"""The gate's bytes per logit of its texts, the truth's included: with a large vocabulary, hundreds of MiB"""
JUDGED_LOGIT_BYTES = 10
"""A judgement's bytes per logit of an iteration, without the stored truth: the logit, a copy of its truth, and a share
of one row's errors"""
JUDGED_TOKENS = max(SOME, *(sum(iteration.counts.values()) for iteration in PARTS.iterations))
"""The most tokens of one iteration whose logits are computed"""

FAR_COPIES = 4
"""Copies of the keys and values that the token FAR sees in a layer: gathered, in a wider type, with their scores"""

MIB = 1024 * 1024


def room_bytes(loaded: LoadedModel) -> int:
    """The most bytes of truth and judgement, without the model and its forward pass's intermediate results"""
    return _page_bytes(loaded) + TOKENS * loaded.vocabulary * LOGIT_BYTES


def judgement_bytes(loaded: LoadedModel) -> int:
    """The most bytes of a judgement, once the truth exists"""
    return _page_bytes(loaded) + JUDGED_TOKENS * loaded.vocabulary * JUDGED_LOGIT_BYTES


def _page_bytes(loaded: LoadedModel) -> int:
    of_far = (
        pages_for(far_position(loaded.max_positions), PAGE_TOKENS)
        * loaded.shape.bytes_per_page()
        // loaded.shape.layers
    )
    return max(PARTS.pages, CROWD.pages) * loaded.shape.bytes_per_page() + FAR_COPIES * of_far


def check_room(loaded: LoadedModel, needed: int) -> None:
    """Raises MemoryError in time: an allocation would succeed, and its use would kill the process."""
    if loaded.device.type == "cpu" and needed > (left := available_host_bytes()):
        raise MemoryError(f"{needed / MIB:.0f} MiB are needed to judge, and {left / MIB:.0f} MiB are left")
