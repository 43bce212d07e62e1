"""Matches a tenant's patterns for module names, within one time limit for all patterns together.

Most patterns are plain names and need no regular expression. Other patterns are refused if compiling them could take
much memory. Compiling and matching share one time limit: they run in a thread, which nothing else could stop.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import regex

from motet.clock import Clock
from motet.errors import AdapterIncompatible

MATCHING_SECONDS = 1.0
"""CPU time of the checking thread: a thousand times what the patterns that tools write need on a large model"""

MAX_PATTERN_CHARS = 1000
"""The most characters of a pattern, and the most repetitions of a part of a pattern: a module's path is shorter."""

_BRACES = regex.compile(r"\{(?:\d{1,4},?\d{0,4})\}")
_GROUPS = regex.compile(r"\(\?(?:[:!=]|<[!=])")
_PLAIN = regex.compile(r"[A-Za-z0-9_.-]+")

Number = TypeVar("Number", int, float)
Test = Callable[[str], bool]
Match = Callable[[str], "regex.Match[str] | None"]


class Matcher:
    """Raises AdapterIncompatible, which names `file`, for an invalid pattern, and at the time limit."""

    def __init__(self, file: str, *, seconds: float = MATCHING_SECONDS, clock: Clock = time.thread_time) -> None:
        self._file = file
        self._clock = clock
        self._left = seconds
        self._ends = 0.0
        self._tests: dict[str, Test] = {}
        self._matches: dict[str, Match] = {}

    def first(self, pattern: Mapping[str, Number], module: str, default: Number) -> Number:
        """PEFT's rule: the value of the first key that, as a regular expression, matches the end of the path."""
        with self._spending():
            for key, value in pattern.items():
                if self._test(key, rf"(.*\.)?({key})$")(module):
                    return value
        return default

    def is_whole(self, pattern: str, module: str) -> bool:
        whole = rf"(?:{pattern})\Z"
        with self._spending():
            return self._test(whole, whole)(module)

    def at_start(self, expression: str, module: str) -> "regex.Match[str] | None":
        with self._spending():
            return self._match(expression)(module)

    def accept(self, pattern: str) -> str:
        """The pattern, if it can be compiled with little memory. Raises ValueError otherwise."""
        if _PLAIN.fullmatch(pattern) is None:
            _check_pattern(pattern)
            with self._spending():
                regex.compile(pattern)
        elif len(pattern) > MAX_PATTERN_CHARS:
            raise _unusual(pattern)
        return pattern

    @contextmanager
    def _spending(self) -> Iterator[None]:
        self._ends = self._clock() + self._left
        yield
        self._left = self._ends - self._clock()
        if self._left <= 0:
            raise self._too_long("all of them together")

    def _test(self, key: str, expression: str) -> Test:
        test = self._tests.get(key)
        if test is None:
            plain = key != expression and _PLAIN.fullmatch(key) is not None
            test = self._tests[key] = _ends_with(key) if plain else self._expression(expression)
        return test

    def _expression(self, expression: str) -> Test:
        match = self._match(expression)
        return lambda module: match(module) is not None

    def _match(self, expression: str) -> Match:
        known = self._matches.get(expression)
        if known is not None:
            return known
        try:
            compiled = regex.compile(expression)
        except regex.error as error:
            raise AdapterIncompatible(
                f"A regular expression in {self._file} is not valid: {str(error)[:200]}.", reason="FormatRejected"
            ) from None

        def match(module: str) -> "regex.Match[str] | None":
            left = self._ends - self._clock()
            try:
                return compiled.match(module, timeout=left) if left > 0 else None
            except TimeoutError:
                self._left = 0.0
                raise self._too_long(expression[:80]) from None

        self._matches[expression] = match
        return match

    def _too_long(self, which: str) -> AdapterIncompatible:
        return AdapterIncompatible(
            f"A regular expression in {self._file} takes too long ({which}). Name the modules instead.",
            reason="FormatRejected",
        )


def _ends_with(key: str) -> Test:
    """Like the regular expression `(.*\\.)?(key)$`, for a key whose only special character is the dot."""

    def ends(module: str) -> bool:
        start = len(module) - len(key)
        if start < 0 or (start > 0 and module[start - 1] != "."):
            return False
        tail = module[start:]
        return tail == key or all(wanted in (".", found) for wanted, found in zip(key, tail, strict=True))

    return ends


def _check_pattern(pattern: str) -> None:
    counts = [int(number) for braces in _BRACES.findall(pattern) for number in braces[1:-1].split(",") if number]
    if (
        len(pattern) > MAX_PATTERN_CHARS
        or pattern.count("{") != len(_BRACES.findall(pattern))
        or pattern.count("(?") != len(_GROUPS.findall(pattern))
        or math.prod(max(count, 1) for count in counts) > MAX_PATTERN_CHARS
    ):
        raise _unusual(pattern)


def _unusual(pattern: str) -> ValueError:
    return ValueError(f"the regular expression {pattern[:80]} is too long or too complex for a module's name")
