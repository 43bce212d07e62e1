"""Writes answers that are blocks, one after the other: reasoning, text, or a call of a tool. Pure."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from motet.tool_calls.parser import CallDelta
from motet_gateway.answers.call import Call
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.logprobs import Columns
from motet_gateway.answers.parts import Scores
from motet_gateway.answers.writer import AnswerWriter, Piece
from motet_gateway.generation import EndReason


@dataclass(slots=True)
class Block:
    index: int
    call: CallDelta | None = None
    """The first one of a call: it has id, name and number. None: a text, or reasoning."""
    reasoning: bool = False
    parts: list[str] = field(default_factory=list)
    """Of the text, or of the call's arguments."""
    logprobs: list[Columns] = field(default_factory=list)
    """Of a text."""
    cut: bool = False
    """Whether the limit of tokens has ended the answer within it."""

    @property
    def is_text(self) -> bool:
        return self.call is None and not self.reasoning

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
        said = choice.take()
        if not self._begun and (said or choice.finish is not None):
            self._begun = True
            events += self.opening()
        scores: Columns = {}
        for part in said:
            if isinstance(part, Scores):
                if part.of_text:
                    scores = part.columns
                else:
                    self._drop(choice, part.columns)
            elif isinstance(part, str):
                self._open(Block(len(self.blocks)), events)
                self._add(part, scores, events)
                scores = {}
            elif isinstance(part, CallDelta):
                if part.id:
                    self._begin(Block(len(self.blocks), part), events)
                self._add(part.arguments, {}, events)
            elif self._call.body.shows_reasoning:
                self._open(Block(len(self.blocks), reasoning=True), events)
                self._add(part.text, {}, events)
        if choice.finish is not None and self.never_empty and not self.blocks:
            self._begin(Block(0), events)
        if scores and self.blocks and self.blocks[-1].is_text:
            self._add("", scores, events)
        else:
            self._drop(choice, scores)
        if choice.finish is not None and self.blocks:
            self.blocks[-1].cut = choice.finish is EndReason.LENGTH
            self._end(events)

    def _drop(self, choice: ChoiceText, scores: Columns) -> None:
        if scores and choice.logprobs is not None:
            choice.logprobs.release(scores)

    def _open(self, block: Block, events: list[bytes]) -> None:
        """If none of its kind is."""
        if not self.blocks or (last := self.blocks[-1]).call is not None or last.reasoning is not block.reasoning:
            self._begin(block, events)

    def _begin(self, block: Block, events: list[bytes]) -> None:
        self._end(events)
        self.blocks.append(block)
        events += self.block_begins(block)

    def _add(self, text: str, scores: Columns, events: list[bytes]) -> None:
        """To the open block. Only texts have log probabilities."""
        block = self.blocks[-1]
        if text:
            block.parts.append(text)
        if scores:
            block.logprobs.append(scores)
        if text or scores:
            events += self.block_grows(block, text, [scores] if scores else [])

    def _end(self, events: list[bytes]) -> None:
        if self.blocks:
            events += self.block_ends(self.blocks[-1])

    @abstractmethod
    def opening(self) -> Sequence[bytes]:
        """The first events."""

    @abstractmethod
    def block_begins(self, block: Block) -> Sequence[bytes]: ...

    @abstractmethod
    def block_grows(self, block: Block, text: str, logprobs: Sequence[Columns]) -> Sequence[bytes]: ...

    @abstractmethod
    def block_ends(self, block: Block) -> Sequence[bytes]: ...

    @abstractmethod
    def finished(self) -> list[Piece]:
        """The whole answer."""
