"""Which numbers of peers are believed: a term or an epoch that was adopted can never be taken back."""

from motet.errors import InvalidRequest

MAX_TERM_JUMP = 2**32
"""How far a term may be above the highest known. A state that was lost is rebuilt from what peers have seen, and then a
term may be a time in seconds (below 2^32); whoever lies has to be believed 2^31 times before the numbers end."""

HIGHEST_TERM = 2**63
"""Half of what the wire can hold: there is always a higher one."""

HIGHEST_EPOCH = 2**31
"""Half of what the wire can hold: a request is placed a few times, and each placement needs a higher number."""


def is_term(text: str) -> bool:
    """Whether what is kept on a disk or in a Lease can have been written by us."""
    return text.isascii() and text.isdecimal() and len(text) <= len(str(2**64)) and int(text) <= HIGHEST_TERM


def check_term(term: int, highest: int, said_by: str) -> None:
    """Raise InvalidRequest for a term that must not be adopted. `highest` is 0 for who has lost all that it knew."""
    if term > min(highest + MAX_TERM_JUMP, HIGHEST_TERM):
        raise InvalidRequest(
            f"{said_by} speaks of term {term}, which is not believed: the highest known is {highest}, and none can be "
            f"more than {MAX_TERM_JUMP} above it. Restart who says it",
            param="term",
        )


def check_leaders_term(term: int, highest: int, said_by: str) -> None:
    """As `check_term`, for the greeting of who leads: whoever has heard of no term yet takes the first."""
    check_term(term, highest or min(term, HIGHEST_TERM), said_by)


def check_epoch(epoch: int, request: str) -> int:
    """The epoch, if another can follow it."""
    if epoch > HIGHEST_EPOCH:
        raise InvalidRequest(
            f"epoch {epoch} of {request!r} is above {HIGHEST_EPOCH}: it counts placements", param="epoch"
        )
    return epoch
