"""Writes answers that are blocks, one after the other: text, or a call of a tool. Pure."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from motet.tool_calls.parser import CallDelta
from motet_gateway.answers.call import Call
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.logprobs import Columns
from motet_gateway.answers.writer import AnswerWriter, Piece
from motet_gateway.generation import EndReason


@dataclass(slots=True)
class Block:
    index: int
    call: CallDelta | None = None
    """The first one of a call: it has id, name and number. None: a text."""
    parts: list[str] = field(default_factory=list)
    """Of the text, or of the call's arguments."""
    logprobs: list[Columns] = field(default_factory=list)
    """Of a text."""
    cut: bool = False
    """Whether the limit of tokens has ended the answer within it."""

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockWriter(AnswerWriter):
    """Of an answer that is one choice. The last block is open until the next one begins or the answer ends."""

    never_empty = False
    """Whether an answer without text or calls has an empty text."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.blocks: list[Block] = []
        self._begun = False
        """Whether the first event was written."""

    @property
    def choice(self) -> ChoiceText:
        (choice,) = self._call.choices
        return choice

    def take(self) -> list[bytes]:
        parts: list[bytes] = []
        for choice in self._changed.values():
            self._write(choice, parts)
        self._changed.clear()
        return parts

    def whole(self) -> list[Piece]:
        self._write(self.choice, [])
        return self.finished()

    def _write(self, choice: ChoiceText, events: list[bytes]) -> None:
        text, calls = choice.take(), list(choice.take_calls())
        logprobs = choice.logprobs.take(still_held=True) if choice.logprobs else None
        if not self._begun and (text or calls or logprobs or choice.finish is not None):
            self._begun = True
            events += self.opening()
        while calls and not calls[0].id:  # of the open call, so they come before what was written behind it
            self._add(calls.pop(0).arguments, None, events)
        if text or logprobs:
            if not self.blocks or self.blocks[-1].call is not None:
                self._begin(Block(len(self.blocks)), events)
            self._add(text, logprobs, events)
        for call in calls:
            if call.id:
                self._begin(Block(len(self.blocks), call), events)
            self._add(call.arguments, None, events)
        if choice.finish is not None:
            if self.never_empty and not self.blocks:
                self._begin(Block(0), events)
            if self.blocks:
                self.blocks[-1].cut = choice.finish is EndReason.LENGTH
            self._end(events)

    def _begin(self, block: Block, events: list[bytes]) -> None:
        self._end(events)
        self.blocks.append(block)
        events += self.block_begins(block)

    def _add(self, text: str, logprobs: Columns | None, events: list[bytes]) -> None:
        block = self.blocks[-1]
        if text:
            block.parts.append(text)
        if logprobs:
            block.logprobs.append(logprobs)
        if text or logprobs:
            events += self.block_grows(block, text, logprobs)

    def _end(self, events: list[bytes]) -> None:
        if self.blocks:
            events += self.block_ends(self.blocks[-1])

    @abstractmethod
    def opening(self) -> Sequence[bytes]:
        """The first events."""

    @abstractmethod
    def block_begins(self, block: Block) -> Sequence[bytes]: ...

    @abstractmethod
    def block_grows(self, block: Block, text: str, logprobs: Columns | None) -> Sequence[bytes]: ...

    @abstractmethod
    def block_ends(self, block: Block) -> Sequence[bytes]: ...

    @abstractmethod
    def finished(self) -> list[Piece]:
        """The whole answer."""
