"""Reads a text that comes in pieces. Parsers of it are generators, which yield where they need more of it. Pure."""

import json
import re
from collections.abc import Generator

MAX_UNDECIDED = 16 * 1024
"""The most characters of what may become a call. It waits until that is decided, and is copied with each piece."""
MAX_SHORT = 1024
"""The most characters of a name, a number or another short thing."""

Needs = Generator[None, None, bool]

_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class Reader:
    """`at`: where it reads. All before the mark is accounted for, and forgotten."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self._mark = 0
        self.final = False
        """No more text will come."""
        self.ran_out = False
        """More was wanted then."""

    def add(self, text: str) -> None:
        self.text = self.text[self._mark :] + text
        self.at -= self._mark
        self._mark = 0

    def account(self) -> None:
        """All that was read belongs to something."""
        self._mark = self.at

    @property
    def left(self) -> int:
        """Characters that belong to nothing yet, read or not."""
        return len(self.text) - self._mark

    @property
    def undecided(self) -> int:
        """Characters that were read and belong to nothing yet."""
        return self.at - self._mark

    def take(self) -> str:
        """All that was read and belongs to nothing yet."""
        text = self.text[self._mark : self.at]
        self._mark = self.at
        return text

    def rest(self) -> str:
        """The same, with what was not read; nothing if it is not final."""
        if self.final:
            self.at = len(self.text)
        return self.take()

    def wait(self) -> Needs:
        """For more text. False: none will come, or too much waits already."""
        self.ran_out = self.final
        if self.final or self.undecided > MAX_UNDECIDED:
            return False
        yield
        return True

    def skip_to(self, word: str) -> bool:
        """To the next place of the word. If there is none: to where one may begin."""
        found = self.text.find(word, self.at) if word else -1
        if found >= 0:
            self.at = found
            return True
        most = min(len(word) - 1, len(self.text) - self.at)
        begun = next((size for size in range(most, 0, -1) if self.text.endswith(word[:size])), 0)
        self.at = len(self.text) - begun
        return False

    def peek(self) -> Generator[None, None, str]:
        """The next character; empty: there is none."""
        while self.at >= len(self.text):
            if not (yield from self.wait()):
                return ""
        return self.text[self.at]

    def literal(self, word: str, *, or_beginning: bool = False) -> Needs:
        """Whether the word comes next. It is read then. `or_beginning`: also what the end of the text leaves of it."""
        while not self.text.startswith(word, self.at):
            if not word.startswith(self.text[self.at : self.at + len(word)]):
                return False
            if not (yield from self.wait()):
                self.at = len(self.text) if or_beginning else self.at
                return or_beginning
        self.at += len(word)
        return True

    def space(self) -> Generator[None, None, None]:
        more = True
        while more:
            if (match := _SPACE.match(self.text, self.at)) is not None:
                self.at = match.end()
            more = self.at == len(self.text) and (yield from self.wait())

    def short(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """What matches the pattern next, as soon as it is known where it ends; empty: nothing does, or too much."""
        while True:
            match = pattern.match(self.text, self.at)
            if match is not None and (match.end() < len(self.text) or self.final):
                if len(match[0]) > MAX_SHORT:
                    return ""
                self.at = match.end()
                return match[0]
            if len(self.text) - self.at > MAX_SHORT or not (yield from self.wait()):
                return ""

    def string(self) -> Generator[None, None, str | None]:
        """A short string of JSON."""
        if (yield from self.peek()) != '"':
            return None
        while (match := _STRING.match(self.text, self.at)) is None:
            if len(self.text) - self.at > MAX_SHORT or not (yield from self.wait()):
                return None
        if len(match[0]) > MAX_SHORT:
            return None
        self.at = match.end()
        try:
            value = json.loads(match[0], strict=False)
        except ValueError:
            return None
        return value if isinstance(value, str) else None
