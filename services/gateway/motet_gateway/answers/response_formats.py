"""The two response formats, chat and plain completion, each whole and as a stream."""

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from motet_gateway import sse
from motet_gateway.answers.choice import ChoiceText, TokenText
from motet_gateway.tokens.text_model import ModelTokenizer
from motet_gateway.tokens.token_bytes import TokenBytes, readable

Json = dict[str, Any]

MIN_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Format(ABC):
    """`usage_in_chunks`: every chunk has `usage`, null until it is known, because the client asked for it."""

    prefix: str
    object_whole: str
    object_chunk: str

    def __init__(self, request: str, model: str, fingerprint: str, *, usage_in_chunks: bool) -> None:
        self._frame: Json = {"id": f"{self.prefix}-{request}", "created": int(time.time()), "model": model}
        self._fingerprint = {"system_fingerprint": fingerprint}
        self._usage: Json = {"usage": None} if usage_in_chunks else {}
        self._templates: dict[int, sse.EventTemplate] = {}

    def chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        shown = self._usage if usage is None else {"usage": usage}
        return {**self._frame, "object": self.object_chunk, "choices": choices, **self._fingerprint, **shown}

    def text_event(self, index: int, text: str) -> bytes:
        """The event of one step. Everything but the text is encoded in advance."""
        if (template := self._templates.get(index)) is None:
            template = sse.EventTemplate(self.chunk([self.choice_chunk(index, sse.EventTemplate.TEXT, None, None)]))
            self._templates[index] = template
        return template.fill(text)

    def full_event(
        self, index: int, text: str | None, logprobs: Json | None, finish: str | None, usage: Json | None
    ) -> bytes:
        return sse.event(self.chunk([self.choice_chunk(index, text, logprobs, finish)], usage))

    def usage_event(self, usage: Json) -> bytes:
        return sse.event(self.chunk([], usage))

    @abstractmethod
    def opening(self, index: int, /) -> bytes:
        """The event before a choice's first text, in the same write."""

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        return {**self._frame, "object": self.object_whole, "choices": choices, **self._fingerprint, "usage": usage}

    @abstractmethod
    def choice_chunk(self, index: int, text: str | None, logprobs: Json | None, finish: str | None) -> Json: ...

    @abstractmethod
    def choice_whole(self, choice: ChoiceText, text: str, logprobs: Json | None) -> Json: ...

    @abstractmethod
    def logprobs(self, index: int, /, tokens: Sequence[TokenText], text: ModelTokenizer, top: int) -> Json: ...


class ChatFormat(Format):
    prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def opening(self, index: int, /) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return sse.event(self.chunk([choice]))

    def choice_chunk(self, index: int, text: str | None, logprobs: Json | None, finish: str | None) -> Json:
        delta = {} if text is None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def choice_whole(self, choice: ChoiceText, text: str, logprobs: Json | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}

    def logprobs(self, _index: int, /, tokens: Sequence[TokenText], text: ModelTokenizer, top: int) -> Json:
        return {
            "content": [
                _token(text.token_bytes.of(item.token), item.added_bytes, item.logprobs.logprob)
                | {"top_logprobs": [_alternative(text, token, logprob) for token, logprob in _top(item, top)]}
                for item in tokens
            ],
            "refusal": None,
        }


class CompletionFormat(Format):
    prefix = "cmpl"
    object_whole = "text_completion"
    object_chunk = "text_completion"

    def __init__(self, request: str, model: str, fingerprint: str, *, usage_in_chunks: bool) -> None:
        super().__init__(request, model, fingerprint, usage_in_chunks=usage_in_chunks)
        self._characters: dict[int, _CharacterCounter] = {}

    def opening(self, _index: int, /) -> bytes:
        return b""

    def choice_chunk(self, index: int, text: str | None, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": index, "text": text or "", "logprobs": logprobs, "finish_reason": finish}

    def choice_whole(self, choice: ChoiceText, text: str, logprobs: Json | None) -> Json:
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}

    def logprobs(self, index: int, /, tokens: Sequence[TokenText], text: ModelTokenizer, top: int) -> Json:
        token_bytes = text.token_bytes
        characters = self._characters.setdefault(index, _CharacterCounter())
        return {
            "tokens": [readable(item.added_bytes or token_bytes.of(item.token)) for item in tokens],
            "token_logprobs": [_finite(item.logprobs.logprob) if item.scored else None for item in tokens],
            "top_logprobs": [_by_text(item, top, token_bytes) if item.scored else None for item in tokens],
            "text_offset": [characters.before(item.added_bytes) for item in tokens],
        }


def _by_text(item: TokenText, count: int, token_bytes: TokenBytes) -> dict[str, float]:
    """Of alternatives that read alike, the most likely one is shown: the first."""
    shown: dict[str, float] = {}
    for token, logprob in _top(item, count):
        shown.setdefault(readable(token_bytes.of(token)), _finite(logprob))
    return shown


def _top(item: TokenText, count: int) -> list[tuple[int, float]]:
    return list(zip(item.logprobs.top_ids, item.logprobs.top_logprobs, strict=False))[:count]


def _token(spelled: bytes, added: bytes, logprob: float) -> Json:
    """The bytes of all tokens join to the answer's text, unless a stop string has cut the text."""
    return {"token": readable(added or spelled), "logprob": _finite(logprob), "bytes": list(added)}


def _alternative(text: ModelTokenizer, token: int, logprob: float) -> Json:
    spelled = text.token_bytes.of(token)
    return _token(spelled, spelled, logprob)


class _CharacterCounter:
    """Counts characters in a text that comes byte by byte."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0

    def before(self, added: bytes) -> int:
        """The number of complete characters before these bytes."""
        before = self._count
        self._count += len(self._decoder.decode(added))
        return before


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
