"""Answers in the form of LoRAX: a stream has an event for each token. Pure."""

import codecs
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any

import orjson

from motet.api.v1 import runner_pb2
from motet.errors import MotetError, Overloaded
from motet_gateway import sse
from motet_gateway.answers.call import Call
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.logprobs import MIN_LOGPROB, CharacterCounter, LogprobsWriter
from motet_gateway.answers.lorax.body import GenerateBody
from motet_gateway.answers.parts import Part, scores, texts
from motet_gateway.answers.writer import AnswerWriter, Piece
from motet_gateway.generation import EndReason
from motet_gateway.tokens.detokenizer import marks_of_broken_text
from motet_gateway.tokens.token_bytes import TokenBytes, readable

Json = dict[str, Any]

TOKENS = "tokens"


class TokenWriter(LogprobsWriter):
    names = (TOKENS,)

    def __init__(
        self,
        token_bytes: TokenBytes,
        top: int,
        *,
        hold: Callable[[int], None] = lambda _: None,
        characters: CharacterCounter | None = None,
        ids: bool = False,
    ) -> None:
        super().__init__(token_bytes, top, hold=hold, characters=characters, ids=ids)
        self._decode = codecs.getincrementaldecoder("utf-8")(marks_of_broken_text(token_bytes)).decode

    def add(self, token: int, logprobs: runner_pb2.TokenLogprobs, added: bytes, *, scored: bool = True) -> None:  # noqa: ARG002
        shown: Json = {
            "id": token,
            "text": self._decode(added) if added else readable(self.token_bytes.of(token)),
            "logprob": max(logprobs.logprob, MIN_LOGPROB),
            "special": not added,
            "skipped": False,
        }
        if self._top:
            shown["alternative_tokens"] = [
                {"id": other, "text": readable(spelled), "logprob": logprob}
                for other, spelled, logprob in self._alternatives(logprobs)
            ]
        self._add(TOKENS, shown)


class GenerateWriter(AnswerWriter):
    def __init__(self, call: Call, *, listed: bool = False) -> None:
        """`listed`: a whole answer stands in a list, as LoRAX's client library expects it."""
        super().__init__(call)
        assert isinstance(call.body, GenerateBody)
        self._body = call.body
        self._listed = listed
        self._text: list[str] = []
        self._last: Json = {"id": 0, "text": "", "logprob": 0.0, "special": True, "skipped": False}
        """Stands in the last event if that has no token."""

    def clear(self) -> None:
        super().clear()
        self._text.clear()

    def take(self) -> list[bytes]:
        choices = list(self._changed.values())
        self._changed.clear()
        return [event for choice in choices for event in self._events(choice)]

    def last(self) -> list[Piece]:
        return []

    def failed(self, error: MotetError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"

    def whole(self) -> list[Piece]:
        (choice,) = self._call.choices
        said = choice.take()
        answer: Json = {"generated_text": self._full("".join(texts(said)))}
        if self._body.said.details:
            shown = orjson.Fragment(_list(said))
            answer["details"] = self._details(choice) | {"skipped_tokens": 0, "prefill": [], TOKENS: shown}
        return [orjson.dumps([answer] if self._listed else answer)]

    def _events(self, choice: ChoiceText) -> Iterator[bytes]:
        assert choice.logprobs is not None
        said = choice.take()
        self._text += texts(said)
        for columns in scores(said):
            choice.logprobs.release(columns)
        tokens = orjson.loads(_list(said))
        if choice.finish is not None and not tokens:
            tokens = [self._last]
        for at, token in enumerate(tokens, start=1):
            event: Json = {"token": token, "generated_text": None, "details": None}
            if choice.finish is not None and at == len(tokens):
                event |= {"generated_text": self._full("".join(self._text)), "details": self._details(choice)}
            yield sse.event(event)

    def _full(self, text: str) -> str:
        return self._body.inputs + text if self._body.said.return_full_text else text

    def _details(self, choice: ChoiceText) -> Json:
        return {
            "finish_reason": _finish(choice),
            "prompt_tokens": self._call.prompt_tokens,
            "generated_tokens": choice.tokens,
            "seed": self._call.seed if self._body.options["temperature"] else self._body.seed,
        }


def _list(said: Sequence[Part]) -> bytes:
    """Of tokens."""
    return b"[%b]" % b",".join(columns[TOKENS] for columns in scores(said))


def _finish(choice: ChoiceText) -> str:
    if choice.finish is EndReason.LENGTH:
        return "length"
    return "eos_token" if choice.stop_string is None else "stop_sequence"


def error_body(error: MotetError) -> bytes:
    kind = "validation" if error.mapping.http < HTTPStatus.INTERNAL_SERVER_ERROR else "generation"
    kind = "overloaded" if isinstance(error, Overloaded) else kind
    return orjson.dumps({"error": error.for_clients, "error_type": kind})
