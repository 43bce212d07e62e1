"""Which terms and epochs of peers a process accepts. It can never go back to a lower number, so it checks each one."""

from motet.errors import InvalidRequest

MAX_TERM_JUMP = 2**32
"""How far a term may be above the highest known one. After its state was lost, a leader may take the time in seconds
(below 2^32) as its term. A faulty peer would need 2^31 such jumps to use up all numbers."""

MAX_TERM = 2**63
"""Half of what the field of the message can hold, so there is always a higher term."""

MAX_EPOCH = 2**31
"""Half of what the field of the message can hold, so there is always a higher epoch for the next placement."""


class ImpossibleTerm(InvalidRequest):
    """The peer belongs to no leader that this process could follow or succeed."""


def is_term(text: str) -> bool:
    """Whether a text from a file or a Lease is a term that Motet can have written."""
    return text.isascii() and text.isdecimal() and len(text) <= len(str(2**64)) and int(text) <= MAX_TERM


def check_term(term: int, highest: int, source: str) -> None:
    """Raise ImpossibleTerm for a term that is too high. `highest` is 0 if this process has lost its state."""
    if term > min(highest + MAX_TERM_JUMP, MAX_TERM):
        raise ImpossibleTerm(
            f"{source} has term {term}, which is not possible: the highest known term is {highest}, and a new one can "
            f"be at most {MAX_TERM_JUMP} higher. Restart the process that sent it",
            param="term",
        )


def check_leaders_term(term: int, highest: int, source: str) -> None:
    """As `check_term`, for the hello of a leader: a process that knows no term yet accepts the first one."""
    check_term(term, highest or min(term, MAX_TERM), source)


def check_epoch(epoch: int, request: str) -> int:
    """Return the epoch. Raise InvalidRequest if no higher one could follow it."""
    if epoch > MAX_EPOCH:
        raise InvalidRequest(
            f"epoch {epoch} of request {request!r} is above {MAX_EPOCH}, the highest possible one", param="epoch"
        )
    return epoch
