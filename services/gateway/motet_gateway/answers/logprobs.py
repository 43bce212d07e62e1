"""Log probabilities as JSON. Those of a token are written when it comes, so an answer's end costs nothing. Pure."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from typing import Any, Final

import orjson

from motet.api.v1 import runner_pb2
from motet_gateway.tokens.detokenizer import marks_of_broken_text
from motet_gateway.tokens.token_bytes import TokenBytes, readable

MIN_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON does not have."""

Columns = dict[str, bytearray]
"""By name: the elements of a list of the JSON object, with commas between them."""


class LogprobsWriter(ABC):
    """Of one choice, or of one prompt."""

    names: tuple[str, ...]
    last: bytes = b""

    def __init__(
        self,
        token_bytes: TokenBytes,
        top: int,
        *,
        hold: Callable[[int], None] = lambda _: None,
        characters: "CharacterCounter | None" = None,
        ids: bool = False,
    ) -> None:
        """`top`: how many alternatives to show. `hold` gets how many bytes this holds more, or less. `characters`:
        those of the text before; only some forms have offsets. `ids`: tokens are shown by their ids."""
        self.token_bytes = token_bytes
        self._ids = ids
        self._top = top
        self._hold = hold
        self._characters = CharacterCounter(token_bytes) if characters is None else copy(characters)
        self._columns: Columns = {}

    @abstractmethod
    def add(self, token: int, logprobs: runner_pb2.TokenLogprobs, added: bytes, *, scored: bool = True) -> None:
        """`added`: what the token adds to the text; nothing for one that ends it and for a hidden special token.
        `scored`: false for the first token of a prompt, before which nothing tells its probability."""

    def take(self) -> Columns:
        """What has not been taken yet. It counts as held until `release`."""
        taken, self._columns = self._columns, {}
        return taken

    def join(self, taken: Columns, more: Columns) -> None:
        """Add what was taken later."""
        for name, column in more.items():
            into = taken.setdefault(name, bytearray())
            if into:
                into += b","
                self._hold(1)
            into += column

    def release(self, taken: Columns) -> None:
        self._hold(-sum(map(len, taken.values())))

    def as_json(self, *parts: Columns) -> list[bytes | bytearray]:
        """The JSON object of these parts together, in pieces."""
        pieces: list[bytes | bytearray] = []
        for at, name in enumerate(self.names):
            pieces.append(b'%b"%b":[' % (b"," if at else b"{", name.encode()))
            for column in filter(None, (part.get(name) for part in parts)):
                pieces += [column, b","]
            if pieces[-1] == b",":
                pieces.pop()
            pieces.append(b"]")
        return [*pieces, self.last, b"}"]

    def _add(self, name: str, value: Any) -> None:
        column = self._columns.setdefault(name, bytearray())
        before = len(column)
        if before:
            column += b","
        column += orjson.dumps(value)
        self._hold(len(column) - before)

    def _alternatives(self, logprobs: runner_pb2.TokenLogprobs) -> list[tuple[int, bytes, float]]:
        spelled = self.token_bytes.all
        shown = zip(logprobs.top_ids[: self._top], logprobs.top_logprobs[: self._top], strict=False)
        return [(token, spelled[token], max(logprob, MIN_LOGPROB)) for token, logprob in shown]

    def _name(self, token: int, spelled: bytes) -> str:
        return f"token_id:{token}" if self._ids else readable(spelled)


class ChatLogprobs(LogprobsWriter):
    names = ("content",)
    last = b',"refusal":null'

    def add(self, token: int, logprobs: runner_pb2.TokenLogprobs, added: bytes, *, scored: bool = True) -> None:  # noqa: ARG002
        # The bytes of all tokens join to the answer's text, unless a stop string has cut the text.
        name = self._name(token, added or self.token_bytes.of(token))
        shown = _token(name, added, max(logprobs.logprob, MIN_LOGPROB))
        shown["top_logprobs"] = [
            _token(self._name(other, spelled), spelled, logprob)
            for other, spelled, logprob in self._alternatives(logprobs)
        ]
        self._add("content", shown)


class CompletionLogprobs(LogprobsWriter):
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def add(self, token: int, logprobs: runner_pb2.TokenLogprobs, added: bytes, *, scored: bool = True) -> None:
        self._add("tokens", self._name(token, added or self.token_bytes.of(token)))
        self._add("token_logprobs", max(logprobs.logprob, MIN_LOGPROB) if scored else None)
        self._add("top_logprobs", self._by_text(logprobs) if scored else None)
        self._add("text_offset", self._characters.before(added))

    def _by_text(self, logprobs: runner_pb2.TokenLogprobs) -> dict[str, float]:
        """Of alternatives that read alike, the most likely one is shown: the first."""
        shown: dict[str, float] = {}
        for token, spelled, logprob in self._alternatives(logprobs):
            shown.setdefault(self._name(token, spelled), logprob)
        return shown


class CharacterCounter:
    """Counts characters in a text that comes byte by byte, as the detokenizer writes them."""

    __slots__ = ("_count", "_errors", "_rest")

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._errors = marks_of_broken_text(token_bytes)
        self._rest = b""
        self._count = 0

    def before(self, added: bytes) -> int:
        """The number of complete characters before these bytes."""
        before = self._count
        text, used = codecs.utf_8_decode(self._rest + added, self._errors, False)
        self._rest = (self._rest + added)[used:]
        self._count += len(text)
        return before


def _token(name: str, added: bytes, logprob: float) -> dict[str, Any]:
    return {"token": name, "logprob": logprob, "bytes": list(added)}
