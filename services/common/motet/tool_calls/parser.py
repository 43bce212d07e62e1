"""Finds the calls of tools in an answer's text while it comes, in the format of its model. Pure.

Every character is part of the content or of a call. What looks like a call but is none, or calls a tool that the
request does not have, is content. White space beside calls is dropped.
"""

import json
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field

from motet.tool_calls.formats import ToolFormat
from motet.tool_calls.json_calls import json_call
from motet.tool_calls.python_calls import python_call
from motet.tool_calls.reader import MAX_UNDECIDED, Reader

MAX_HELD_SPACE = 64
"""The most white space that waits for what follows: beside a call it is dropped."""


@dataclass(slots=True)
class CallDelta:
    """What is new of a call. The first one of each has its id and name."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ParsedCall:
    id: str
    name: str
    parts: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def arguments(self) -> str:
        """As the model wrote them: a JSON object if the call is complete."""
        return "".join(self.parts)


class CallParser:
    def __init__(
        self, form: ToolFormat, names: Collection[str], make_id: Callable[[], str], *, only_one: bool = False
    ) -> None:
        """`names`: of the tools that may be called. `only_one`: what follows the first call is dropped."""
        self._form = form
        self._names = names
        self._make_id = make_id
        self._only_one = only_one
        self.calls: list[ParsedCall] = []
        self._found: list[tuple[str | CallDelta, int]] = []
        """What may be given out now, in the order of the text, and how many characters have come behind each."""
        self.behind: Sequence[int] = ()
        """How many characters have come behind each part that was given out last. A text is directly before them."""
        self._space = ""
        self._plain_since_call = True
        """Whether there is content behind the last call."""
        self.enough = False
        """The answer needs no more text."""
        self._hopeless = False
        """The answer has so long a text that might have become a call that all of the rest is content."""
        self._reader = Reader()
        self._parsing = self._parse()

    def feed(self, text: str) -> list[str | CallDelta]:
        """The content and what is new of the calls, in the order of the text."""
        if self.enough:
            self.behind = ()
            return []
        self._reader.add(text)
        return self._advance()

    def flush(self) -> list[str | CallDelta]:
        """The rest, now that no more text will come."""
        if self.enough:
            self.behind = ()
            return []
        self._reader.final = True
        found = self._advance()
        if not self._space or not self._plain_since_call:
            return found
        self.behind = [*self.behind, 0]
        return [*found, self._space]

    @property
    def complete(self) -> bool:
        """Whether there are calls, and all of them are whole."""
        return bool(self.calls) and all(call.complete for call in self.calls)

    # -------------------------------------------------------------------------------- what `json_call` and others say

    def knows(self, name: str) -> bool:
        return name in self._names

    def begin_call(self, name: str) -> bool:
        """False: it took too long to know that it is one."""
        if self._reader.undecided > MAX_UNDECIDED:
            return False
        call = ParsedCall(self._make_id(), name)
        self._space = ""
        self._plain_since_call = False
        self._reader.account()
        self._find(CallDelta(len(self.calls), call.id, name, ""))
        self.calls.append(call)
        return True

    def add_arguments(self, text: str) -> None:
        self._reader.account()
        self.calls[-1].parts.append(text)
        self._find(CallDelta(len(self.calls) - 1, "", "", text))

    def end_call(self) -> None:
        self.calls[-1].complete = _is_object(self.calls[-1].arguments)
        self.enough = self._only_one

    # ------------------------------------------------------------------------------------------------------- the text

    def _advance(self) -> list[str | CallDelta]:
        next(self._parsing, None)
        found, self._found = self._found, []
        if not found:
            self.behind = ()
            return []
        self.behind = [behind for _, behind in found]
        return [part for part, _ in found]

    def _find(self, part: str | CallDelta, held: int = 0) -> None:
        self._found.append((part, self._reader.left + held))

    def _say(self, text: str, *, undecided: bool = False) -> None:
        """As content."""
        if self.enough:
            return
        if len(text) > MAX_UNDECIDED and undecided:
            self._hopeless = True
        text = self._space + text
        shown = max(len(text.rstrip()), len(text) - MAX_HELD_SPACE)
        self._space = text[shown:]
        if shown:
            self._find(text[:shown], held=len(self._space))
            self._plain_since_call = True

    def _parse(self) -> Generator[None, None, None]:
        reader, form = self._reader, self._form
        if form.at_start:
            yield from reader.space()
            yield from self._block()
        while not self.enough and (yield from self._find_begin()):
            yield from reader.literal(form.begin)
            yield from self._block()

    def _find_begin(self) -> Generator[None, None, bool]:
        """Of the next block. All before it is content."""
        reader, begin = self._reader, "" if self._hopeless else self._form.begin
        while True:
            found = reader.skip_to(begin)
            self._say(reader.take())
            if found or not (yield from reader.wait()):
                self._say(reader.rest())
                return found

    def _block(self) -> Generator[None, None, None]:
        """What of it belongs to no call is content."""
        reader, form = self._reader, self._form
        call = json_call if form.arguments else python_call
        yield from reader.space()
        more = yield from reader.literal(form.opening)
        while more:
            yield from reader.space()
            before = len(self.calls)
            if not (yield from call(reader, self, form.arguments)):
                if reader.ran_out and len(self.calls) > before:  # the answer ends within a call: it has the rest
                    reader.rest()
                break
            if self.enough:
                return
            reader.account()
            yield from reader.space()
            if not form.between or not (yield from reader.literal(form.between.strip())):
                yield from self._close()
                return
        self._say(reader.take(), undecided=True)

    def _close(self) -> Generator[None, None, None]:
        reader, form = self._reader, self._form
        for word in (form.closing, form.end):
            if not word:
                continue
            if not (yield from reader.literal(word, or_beginning=True)):
                break
            reader.account()
            yield from reader.space()
        self._say(reader.take(), undecided=True)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_int=str, parse_float=str, parse_constant=_no_json), dict)
    except (ValueError, RecursionError):
        return False


def _no_json(word: str) -> None:
    raise ValueError(word)
