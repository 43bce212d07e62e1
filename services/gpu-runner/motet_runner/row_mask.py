"""What the next token of a row may be: worked out when it is needed, and beside the engine's thread if it may take a
while (`mask_threads`). No torch."""

import time
from typing import Protocol

import structlog

from motet.errors import MotetError
from motet.grammars.grammar import impossible

log = structlog.get_logger(__name__)

MASKS_OF_MISTRUST = 16
"""After a slow one, this number of masks has to be quick. A hostile grammar has slow ones now and then."""


class TokenRules(Protocol):
    """Which tokens one sequence may get next. They follow the sequence's tokens."""

    def take(self, token: int, place: int) -> bool:
        """The sequence goes on with this token, at this place of its output. False: it may not, and nothing changes.
        A place comes again if memory runs out before an iteration has ended."""

    def back_to(self, place: int) -> None:
        """Forget the tokens from this place of the output on."""

    def allowed(self) -> bytes:
        """A bit for each token of the vocabulary, the first one in the lowest bit. It may take a while, and another
        thread may make this call: there are no other calls meanwhile."""

    @property
    def failure(self) -> MotetError | None:
        """Why the sequence can get no token at all. None: that is not the rules' doing."""


class RowMask:
    """The rules of one sequence, with which it stays when it is parked, and their bits for its next token."""

    __slots__ = ("_failure", "_mistrust", "_rules", "allowed", "late", "slow")

    def __init__(self, rules: TokenRules) -> None:
        self._rules = rules
        self._failure: MotetError | None = None
        self.allowed: bytes | None = None
        """The rules' bits; None if nobody has made them for the next token."""
        self.late = False
        """True from `begin` to the end of `make`."""
        self.slow = False
        """Whether the last ones were slow."""
        self._mistrust = 1
        """How many more have to be quick until the next ones are expected to be."""

    def take(self, token: int, place: int) -> bool:
        """See `TokenRules`. Not to be called while it is late."""
        taken = self._rules.take(token, place)
        if taken:
            self.allowed = None
        return taken

    @property
    def failure(self) -> MotetError | None:
        return self._failure or self._rules.failure

    def begin(self) -> bool:
        """It is late until `make` has ended. False if its bits are there, or are being made."""
        if self.late or self.allowed is not None:
            return False
        self.late = True
        return True

    @property
    def quick(self) -> bool:
        """Whether the next bits are expected to be quick: none are known to be before the first ones."""
        return not self._mistrust

    def make(self, limit: float) -> None:
        """`limit`: bits that take more seconds of CPU time are slow."""
        began = time.thread_time()
        try:
            self.allowed = self._rules.allowed()
        except BaseException as error:  # also a panic of Rust, which is no Exception: it ends its own request
            log.error("mask_failed", error=repr(error))
            self.allowed = b""  # no token
            self._failure = impossible("the answer cannot go on: its next step has failed")
        self.slow = time.thread_time() - began > limit
        self._mistrust = MASKS_OF_MISTRUST if self.slow else max(0, self._mistrust - 1)
        self.late = False
