"""Writes what comes of a call in the form of one API: as the events of a stream, or whole. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from motet.errors import MotetError
from motet_gateway.answers.call import Call
from motet_gateway.answers.choice import ChoiceText

WRITE_BYTES = 256 * 1024
"""A long answer is written in pieces of this size, so that other streams go on meanwhile."""

Piece = bytes | bytearray


class AnswerWriter(ABC):
    def __init__(self, call: Call) -> None:
        self._call = call
        self._changed: dict[int, ChoiceText] = {}

    def add(self, choice: ChoiceText) -> None:
        """It has something new."""
        self._changed[choice.index] = choice

    def clear(self) -> None:
        """The call begins again, with another model. Nothing was taken before."""
        self._changed.clear()

    @abstractmethod
    def take(self) -> list[bytes]:
        """The events of everything that has come since the last time, as far as it can be written."""

    @abstractmethod
    def last(self) -> list[Piece]:
        """The events after the end of all choices."""

    @abstractmethod
    def failed(self, error: MotetError) -> bytes:
        """The last events of a stream that ends with an error."""

    @abstractmethod
    def whole(self) -> list[Piece]:
        """The answer in pieces, after the end of all choices."""


def in_parts(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """Small ones are joined: each part costs a turn of the event loop."""
    part = bytearray()
    for piece in pieces:
        at = 0
        while at < len(piece):
            more = memoryview(piece)[at : at + WRITE_BYTES - len(part)]
            part += more
            at += len(more)
            if len(part) == WRITE_BYTES:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)
