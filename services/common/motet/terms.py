"""Which terms and epochs of peers a process accepts. It can never go back to a lower number, so it checks each one."""

from motet.errors import InvalidRequest

MAX_TERM_JUMP = 2**32
"""How far a term may be above the highest known one. After its state was lost, a leader may take the time in seconds
(below 2^32) as its term. A faulty peer would need 2^31 such jumps to use up all numbers."""

HIGHEST_TERM = 2**63
"""Half of what the field of the message can hold, so there is always a higher term."""

HIGHEST_EPOCH = 2**31
"""Half of what the field of the message can hold, so there is always a higher epoch for the next placement."""


def is_term(text: str) -> bool:
    """Whether a text from a file or a Lease is a term that Motet can have written."""
    return text.isascii() and text.isdecimal() and len(text) <= len(str(2**64)) and int(text) <= HIGHEST_TERM


def check_term(term: int, highest: int, said_by: str) -> None:
    """Raise InvalidRequest for a term that is too high. `highest` is 0 if this process has lost its state."""
    if term > min(highest + MAX_TERM_JUMP, HIGHEST_TERM):
        raise InvalidRequest(
            f"{said_by} speaks of term {term}, which is not believed: the highest known is {highest}, and none can be "
            f"more than {MAX_TERM_JUMP} above it. Restart who says it",
            param="term",
        )


def check_leaders_term(term: int, highest: int, said_by: str) -> None:
    """As `check_term`, for the hello of a leader: a process that knows no term yet accepts the first one."""
    check_term(term, highest or min(term, HIGHEST_TERM), said_by)


def check_epoch(epoch: int, request: str) -> int:
    """Return the epoch. Raise InvalidRequest if no higher one could follow it."""
    if epoch > HIGHEST_EPOCH:
        raise InvalidRequest(
            f"epoch {epoch} of {request!r} is above {HIGHEST_EPOCH}: it counts placements", param="epoch"
        )
    return epoch
