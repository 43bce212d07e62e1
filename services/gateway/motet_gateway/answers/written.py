"""What is written of a call: the events of a stream, or the whole answer as JSON. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from motet_gateway import sse
from motet_gateway.answers.call import Call
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.form import Form, Piece, usage
from motet_gateway.answers.logprobs import Columns

WRITE_BYTES = 256 * 1024
"""A long answer is written in pieces of this size, so that other streams go on meanwhile."""


class StreamEvents:
    def __init__(self, call: Call) -> None:
        self._call = call
        self._usage = call.body.usage_wanted
        self._changed: dict[int, ChoiceText] = {}
        self._introduced: set[int] = set()

    def add(self, choice: ChoiceText) -> None:
        """It has something new."""
        self._changed[choice.index] = choice

    def clear(self) -> None:
        self._changed.clear()

    def take(self) -> list[bytes]:
        """Of everything that has come since the last time, as far as it can be written."""
        parts: list[bytes] = []
        if (form := self._call.form) is None:
            return parts
        usage_so_far = _usage_of(self._call) if self._usage.continuous_usage_stats else None
        for choice in list(self._changed.values()):
            if (echo := self._call.echo_of(choice)) is None or echo.ready:
                del self._changed[choice.index]
                self._write(choice, form, parts, usage_so_far)
        return parts

    def last(self) -> list[bytes]:
        """After the end of all choices."""
        form = self._call.form
        if form is None or not self._usage.include_usage:
            return [sse.DONE]
        return [form.usage_event(_usage_of(self._call)), sse.DONE]

    def _write(self, choice: ChoiceText, form: Form, parts: list[bytes], usage_so_far: dict[str, Any] | None) -> None:
        piece, calls = choice.take(), choice.take_calls()
        logprobs = choice.logprobs.take() if choice.logprobs else None
        if (piece or calls or logprobs or choice.finish is not None) and choice.index not in self._introduced:
            self._introduced.add(choice.index)
            parts.append(form.opening(choice.index))
            if (echo := self._call.echo_of(choice)) is not None:
                shown = _as_json(choice, echo.logprobs) if echo.logprobs else None
                parts.append(form.full_event(choice.index, echo.text, shown, None, usage_so_far))
        if logprobs or (piece and usage_so_far is not None):
            shown = _as_json(choice, logprobs) if logprobs else None
            parts.append(form.full_event(choice.index, piece, shown, None, usage_so_far))
        elif piece:
            parts.append(form.text_event(choice.index, piece))
        if calls:
            parts.append(form.calls_event(choice.index, calls, usage_so_far))
        if choice.finish is not None:
            parts.append(form.full_event(choice.index, None, None, choice.finish_reason, usage_so_far))


def whole_answer(call: Call) -> list[Piece]:
    """In pieces, after the end of all choices."""
    form = call.form
    assert form is not None
    return form.whole([_whole_choice(call, choice, form) for choice in call.choices], _usage_of(call))


def in_parts(pieces: Sequence[Piece]) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), WRITE_BYTES):
            yield bytes(memoryview(piece)[start : start + WRITE_BYTES])


def _whole_choice(call: Call, choice: ChoiceText, form: Form) -> list[Piece]:
    echo, text = call.echo_of(choice), choice.take()
    text = text if echo is None else echo.text + text
    if choice.logprobs is None:
        return form.choice_whole(choice, text)
    prompt = {} if echo is None else echo.logprobs
    return form.choice_whole(choice, text, choice.logprobs.as_json(prompt, choice.logprobs.take(still_held=True)))


def _as_json(choice: ChoiceText, logprobs: Columns) -> orjson.Fragment:
    assert choice.logprobs is not None
    return orjson.Fragment(b"".join(choice.logprobs.as_json(logprobs)))


def _usage_of(call: Call) -> dict[str, Any]:
    return usage(call.prompt_tokens, call.tokens)
