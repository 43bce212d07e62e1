"""Writes an answer as the Responses API does: one response of items, whole or as events. Pure."""

import secrets
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import orjson

from motet.errors import MotetError
from motet_gateway import sse
from motet_gateway.answers.blocks import Block, BlockWriter
from motet_gateway.answers.call import Call
from motet_gateway.answers.logprobs import Columns
from motet_gateway.answers.responses.body import ResponsesBody
from motet_gateway.answers.responses.conversation import CUSTOM_INPUT
from motet_gateway.answers.writer import Piece
from motet_gateway.error_format import error_content
from motet_gateway.generation import EndReason

Json = dict[str, Any]


class ResponseWriter(BlockWriter):
    never_empty = True

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        assert isinstance(call.body, ResponsesBody)
        self._body = call.body
        self._custom = call.body.custom_tools
        self._events = 0
        self._mark = secrets.token_hex(16)
        """Stands for the log probabilities of a text. Random: no text has it."""
        self._said: Json = {}
        """What each response says of the request."""

    # --------------------------------------------------------------------------------------------------------- events

    def opening(self) -> Sequence[bytes]:
        response = self._response("in_progress", [])
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def block_begins(self, block: Block) -> Sequence[bytes]:
        events = [self._of(block, "response.output_item.added", item=self._item(block, "in_progress", ""))]
        if block.reasoning:
            events.append(self._of_text(block, "response.content_part.added", part=_thought("")))
        elif block.call is None:
            events.append(self._of_text(block, "response.content_part.added", part=_part("", [])))
        return events

    def block_grows(self, block: Block, text: str, logprobs: Sequence[Columns]) -> Sequence[bytes]:
        if block.reasoning:
            return [self._of_text(block, "response.reasoning_text.delta", delta=text)]
        if block.call is None:
            return [self._of_text(block, "response.output_text.delta", delta=text, logprobs=_scores(logprobs))]
        if self._is_custom(block):
            return ()  # the input is a string within the arguments
        return [self._of_item(block, "response.function_call_arguments.delta", delta=text)]

    def block_ends(self, block: Block) -> Sequence[bytes]:
        item, text = self._ended(block, with_logprobs=False), block.text
        events: list[bytes] = []
        if block.reasoning:
            events += (
                self._of_text(block, "response.reasoning_text.done", text=text),
                self._of_text(block, "response.content_part.done", part=_thought(text)),
            )
        elif block.call is None:
            events += (
                self._of_text(block, "response.output_text.done", text=text, logprobs=[]),
                self._of_text(block, "response.content_part.done", part=item["content"][0]),
            )
        elif self._is_custom(block):
            given = item["input"]
            events += (
                self._of_item(block, "response.custom_tool_call_input.delta", delta=given),
                self._of_item(block, "response.custom_tool_call_input.done", input=given),
            )
        else:
            done = "response.function_call_arguments.done"
            events.append(self._of_item(block, done, name=block.call.name, arguments=text))
        return [*events, self._of(block, "response.output_item.done", item=item)]

    def last(self) -> list[Piece]:
        response = self._whole_response()
        return self._with_logprobs(self._event(f"response.{response['status']}", response=response))

    def failed(self, error: MotetError) -> bytes:
        said = error_content(error)
        events = b""
        if self._begun:
            shown = {"code": error.code, "message": said["message"]}
            output = [self._item(block, "incomplete", block.text) for block in self.blocks]
            events = self._event("response.failed", response=self._response("failed", output) | {"error": shown})
        # OpenAI's clients raise an exception for an event that has `error`, but not for a failed response.
        own = {"code": error.code, "message": said["message"], "param": error.param}
        return events + self._event("error", **own, error=said)

    def _event(self, kind: str, **content: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return sse.typed_event({"type": kind, **content, "sequence_number": number})

    def _of(self, block: Block, kind: str, **content: Any) -> bytes:
        return self._event(kind, output_index=block.index, **content)

    def _of_item(self, block: Block, kind: str, **content: Any) -> bytes:
        return self._of(block, kind, item_id=self._id(block), **content)

    def _of_text(self, block: Block, kind: str, **content: Any) -> bytes:
        return self._of_item(block, kind, content_index=0, **content)

    # ---------------------------------------------------------------------------------------------------------- whole

    def finished(self) -> list[Piece]:
        return self._with_logprobs(orjson.dumps(self._whole_response()))

    def _with_logprobs(self, response: bytes) -> list[Piece]:
        """In pieces, with the log probabilities of the texts: one write of megabytes would stop all streams."""
        first, *others = response.split(orjson.dumps(self._mark))
        pieces: list[Piece] = [first]
        for block, behind in zip(filter(attrgetter("is_text"), self.blocks), others, strict=True):
            pieces.append(b"[")
            for at, columns in enumerate(block.logprobs):
                pieces += [b",", columns["content"]] if at else [columns["content"]]
            pieces += [b"]", behind]
        return pieces

    def _whole_response(self) -> Json:
        cut = self.choice.finish is EndReason.LENGTH
        call = self._call
        response = self._response(
            "incomplete" if cut else "completed", [self._ended(block, with_logprobs=True) for block in self.blocks]
        )
        response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        response["completed_at"] = None if cut else int(call.gateway.around.wall())
        response["usage"] = {
            "input_tokens": call.prompt_tokens,
            "input_tokens_details": {"cached_tokens": call.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": call.tokens,
            "output_tokens_details": {"reasoning_tokens": call.reasoning_tokens or 0},
            "total_tokens": call.prompt_tokens + call.tokens,
        }
        return response

    def _response(self, status: str, output: list[Json]) -> Json:
        call = self._call
        self._said = self._said or _said(self._body, call)
        return {
            "id": f"resp_{call.id}",
            "object": "response",
            "created_at": call.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._body.model,
            "output": output,
            "usage": None,
            **self._said,
        }

    def _ended(self, block: Block, *, with_logprobs: bool) -> Json:
        whole = not block.cut
        if block.call is not None:
            whole = self.choice.calls[block.call.index].complete
        return self._item(block, "completed" if whole else "incomplete", block.text, with_logprobs=with_logprobs)

    def _item(self, block: Block, status: str, text: str, *, with_logprobs: bool = False) -> Json:
        """`text`: also of arguments."""
        head = {"id": self._id(block), "status": status}
        if block.reasoning:
            return {**head, "type": "reasoning", "summary": [], "content": [_thought(text)] if text else []}
        if (call := block.call) is None:
            parts = [_part(text, self._mark if with_logprobs else [])]
            content = parts if status != "in_progress" else []
            return {**head, "type": "message", "role": "assistant", "content": content}
        head |= {"call_id": call.id, "name": call.name}
        if self._is_custom(block):
            return {**head, "type": "custom_tool_call", "input": _custom_input(text) if text else ""}
        return {**head, "type": "function_call", "arguments": text}

    def _is_custom(self, block: Block) -> bool:
        return block.call is not None and block.call.name in self._custom

    def _id(self, block: Block) -> str:
        kind = "rs" if block.reasoning else "msg" if block.call is None else "ctc" if self._is_custom(block) else "fc"
        return f"{kind}_{self._call.id}_{block.index}"


def _said(body: ResponsesBody, call: Call) -> Json:
    sampling = call.started[0].order.sampling
    how = {"temperature": round(sampling.temperature, 6), "top_p": round(sampling.top_p or 1, 6)}
    return how | {name: orjson.Fragment(value) for name, value in body.echo.items()}


def _thought(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _part(text: str, logprobs: list[Json] | str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _scores(columns: Sequence[Columns]) -> list[Json] | orjson.Fragment:
    return orjson.Fragment(b"[%b]" % b",".join(one["content"] for one in columns)) if columns else []


def _custom_input(arguments: str) -> str:
    """Of a custom tool. What the model wrote otherwise is passed on as it is."""
    try:
        given = orjson.loads(arguments)[CUSTOM_INPUT]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return arguments
    return given if isinstance(given, str) else arguments
