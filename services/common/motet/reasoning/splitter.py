"""Divides an answer's text into reasoning and content while it comes. Pure.

Every character but the tags is part of one of them. White space beside a tag is dropped. How the text is cut into
pieces does not change the whole.
"""

from enum import Enum, auto

from motet.reasoning.formats import ExpectedReasoning

MAX_HELD_SPACE = 64
"""The most white space that waits for a tag. More of it is kept, also beside one."""


class _Phase(Enum):
    START = auto()
    """It is open whether the answer has reasoning."""
    INSIDE = auto()
    BEHIND = auto()
    """Behind the end tag, before the first character of the content."""
    CONTENT = auto()


class ReasoningSplitter:
    __slots__ = ("_fresh", "_held", "_phase", "_tags", "found")

    def __init__(self, expected: ExpectedReasoning) -> None:
        self._tags = expected
        self._phase = _Phase.INSIDE if expected.begun else _Phase.START
        self.found = expected.begun
        """Whether there is reasoning, as far as it is known."""
        self._fresh = True
        """Of the reasoning nothing but white space has come yet."""
        self._held = ""

    @property
    def over(self) -> bool:
        """Whether all that comes is content."""
        return self._phase in (_Phase.BEHIND, _Phase.CONTENT)

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that may be shown now."""
        if self._phase is _Phase.CONTENT:
            return "", text
        self._held += text
        if self._phase is _Phase.START:
            self._start()
        reasoning = self._inside() if self._phase is _Phase.INSIDE else ""
        if self._phase is _Phase.BEHIND:
            self._held = self._held.lstrip()
            if self._held:
                self._phase = _Phase.CONTENT
        return reasoning, self._take() if self._phase is _Phase.CONTENT else ""

    def flush(self) -> tuple[str, str]:
        """The rest, now that no more text will come."""
        rest = self._take()
        return (rest, "") if self._phase is _Phase.INSIDE else ("", rest)

    def _start(self) -> None:
        begin, text = self._tags.begin, self._held.lstrip()
        if len(self._held) - len(text) > MAX_HELD_SPACE:
            self._phase = _Phase.CONTENT
        elif text.startswith(begin):
            self._held = text[len(begin) :]
            self._phase, self.found = _Phase.INSIDE, True
        elif not begin.startswith(text):
            self._phase = _Phase.CONTENT

    def _inside(self) -> str:
        if self._fresh:
            self._held = self._held.lstrip()
            self._fresh = not self._held
        end = self._tags.end
        before, found, behind = self._held.partition(end)
        if found:
            self._held, self._phase = behind, _Phase.BEHIND
        else:
            most = min(len(end) - 1, len(before))
            begun = next((size for size in range(most, 0, -1) if before.endswith(end[:size])), 0)
            before = before[: len(before) - begun]
        shown = max(len(before.rstrip()), len(before) - MAX_HELD_SPACE)
        if not found:
            self._held = self._held[shown:]
        return before[:shown]

    def _take(self) -> str:
        held, self._held = self._held, ""
        return held
