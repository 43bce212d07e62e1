"""Writes an answer as the Messages API does: one message of blocks, whole or as events. Pure."""

from collections.abc import Sequence
from typing import Any

import orjson
from pydantic_core import from_json, to_json

from motet.errors import Internal, MotetError
from motet_gateway import sse
from motet_gateway.answers.blocks import Block, BlockWriter
from motet_gateway.answers.call import Call
from motet_gateway.answers.logprobs import Columns
from motet_gateway.answers.messages.errors import messages_error
from motet_gateway.answers.writer import Piece
from motet_gateway.generation import EndReason

Json = dict[str, Any]
NO_OBJECT = (
    "The model called {name!r} with arguments that are no JSON object. Send the request again; a tool with "
    "`strict: true` gets only arguments that its schema allows."
)

SIGNATURE = "motet"
"""Of thinking. Clients want one, and nobody checks it."""


class MessageWriter(BlockWriter):
    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._text_event: sse.EventTemplate | None = None
        """Of the open block."""

    def opening(self) -> Sequence[bytes]:
        message = self._message([], None, None, self._usage(0))
        return [sse.typed_event({"type": "message_start", "message": message})]

    def block_begins(self, block: Block) -> Sequence[bytes]:
        content = _block(block, orjson.Fragment(b"{}"), "")
        self._text_event = sse.EventTemplate(_delta(block, sse.EventTemplate.TEXT), typed=True)
        return [sse.typed_event({"type": "content_block_start", "index": block.index, "content_block": content})]

    def block_grows(self, block: Block, text: str, _logprobs: Sequence[Columns]) -> Sequence[bytes]:
        if block.call is not None:  # clients parse each piece, so none is sent before it is known that they can
            return ()
        assert self._text_event is not None
        return [self._text_event.fill(text)]

    def block_ends(self, block: Block) -> Sequence[bytes]:
        assert self._text_event is not None
        events = [sse.typed_event({"type": "content_block_stop", "index": block.index})]
        if block.reasoning:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            events.insert(0, sse.typed_event({"type": "content_block_delta", "index": block.index, "delta": delta}))
        if block.call is not None:
            _ = _input(block)  # checks them
            if block.text:
                events.insert(0, self._text_event.fill(block.text))
        return events

    def last(self) -> list[Piece]:
        reason, stop = self._stop_reason()
        delta = {"stop_reason": reason, "stop_sequence": stop}
        usage = self._usage(self._call.tokens)
        return [
            sse.typed_event({"type": "message_delta", "delta": delta, "usage": usage}),
            sse.typed_event({"type": "message_stop"}),
        ]

    def failed(self, error: MotetError) -> bytes:
        return sse.typed_event(messages_error(error, self._call.history.http_id))

    def finished(self) -> list[Piece]:
        blocks = [
            _block(block, _input(block) if block.call is not None else None, block.text, SIGNATURE)
            for block in self.blocks
        ]
        return [orjson.dumps(self._message(blocks, *self._stop_reason(), self._usage(self._call.tokens)))]

    def _message(self, content: list[Json], reason: str | None, stop: str | None, usage: Json) -> Json:
        return {
            "id": f"msg_{self._call.id}",
            "type": "message",
            "role": "assistant",
            "model": self._call.body.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _usage(self, tokens: int) -> Json:
        cached = self._call.cached_tokens or 0
        return {
            "input_tokens": self._call.prompt_tokens - cached,  # in this API without those that were read
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": tokens,
        }

    def _stop_reason(self) -> tuple[str, str | None]:
        """And the stop string."""
        choice = self.choice
        if choice.finish is EndReason.LENGTH:
            _, wanted = self._call.body.output_limit
            full = wanted is not None and choice.tokens < wanted
            return "model_context_window_exceeded" if full else "max_tokens", None
        if choice.finish_reason == "tool_calls":
            return "tool_use", None
        return ("end_turn" if choice.stop_string is None else "stop_sequence"), choice.stop_string


def _block(block: Block, arguments: orjson.Fragment | None, text: str, signature: str = "") -> Json:
    if block.reasoning:
        return {"type": "thinking", "thinking": text, "signature": signature}
    if block.call is None:
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": arguments}


def _delta(block: Block, text: str) -> Json:
    delta = {"type": "text_delta", "text": text}
    if block.reasoning:
        delta = {"type": "thinking_delta", "thinking": text}
    if block.call is not None:
        delta = {"type": "input_json_delta", "partial_json": text}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


def _input(block: Block) -> orjson.Fragment:
    """A call's arguments as the model wrote them. Of a call that was cut: what is whole of it, as clients make it of a
    stream. Raises Internal: in their place nothing may be given out, since a tool would act on it."""
    assert block.call is not None
    text = block.text
    try:
        made = from_json(text, allow_inf_nan=False, allow_partial=block.cut) if text or not block.cut else {}
    except ValueError:
        made = None
    if not isinstance(made, dict):
        raise Internal(NO_OBJECT.format(name=block.call.name))
    return orjson.Fragment(to_json(made) if block.cut else text)
