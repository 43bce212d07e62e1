"""The JSON form of an answer of OpenAI's older APIs, whole and as a stream of chunks. Each has its own. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from motet.tool_calls.parser import CallDelta
from motet_gateway import sse
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.writer import Piece

Json = dict[str, Any]


class Form(ABC):
    """`usage_in_chunks`: every chunk has `usage`, null until it is known, because the client asked for it."""

    prefix: str
    object_whole: str
    object_chunk: str
    prompt_ids_in_choices: bool
    """Where vLLM's clients look for them, and for log probabilities of prompts; otherwise beside the choices"""

    def __init__(
        self,
        request: str,
        created: int,
        model: str,
        fingerprint: str,
        *,
        usage_in_chunks: bool,
        tier: str | None = None,
    ) -> None:
        """`tier`: the client's service tier, if it asked for one."""
        self._frame: Json = {"id": f"{self.prefix}-{request}", "created": created, "model": model}
        self._fingerprint = {"system_fingerprint": fingerprint} | ({} if tier is None else {"service_tier": tier})
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
        self,
        index: int,
        text: str | None,
        logprobs: orjson.Fragment | None,
        finish: str | None,
        usage: Json | None,
        *,
        ids: Sequence[int] = (),
    ) -> bytes:
        choice = self.choice_chunk(index, text, logprobs, finish)
        return sse.event(self.chunk([choice | {"token_ids": ids} if ids else choice], usage))

    def prompt_event(self, index: int, ids: Sequence[int]) -> bytes:
        choice, shown = self.choice_chunk(index, None, None, None), {"prompt_token_ids": ids}
        if self.prompt_ids_in_choices:
            return sse.event(self.chunk([choice | shown]))
        return sse.event(self.chunk([choice]) | shown)

    def end_event(self, choice: ChoiceText, usage: Json | None) -> bytes:
        end = self.choice_chunk(choice.index, None, None, choice.finish_reason)
        return sse.event(self.chunk([end | {"stop_reason": choice.stop_reason}], usage))

    def usage_event(self, usage: Json) -> bytes:
        return sse.event(self.chunk([], usage))

    @abstractmethod
    def opening(self, index: int, /) -> bytes:
        """The event before a choice's first text, in the same write."""

    def whole(
        self,
        choices: Sequence[Sequence[Piece]],
        usage: Json,
        prompt_ids: Sequence[int] | None = None,
        prompt_logprobs: Piece = b"",
    ) -> list[Piece]:
        """The answer in pieces."""
        frame = {**self._frame, "object": self.object_whole, **self._fingerprint, "usage": usage}
        if prompt_ids is not None and not self.prompt_ids_in_choices:
            frame["prompt_token_ids"] = prompt_ids
        pieces: list[Piece] = [orjson.dumps(frame)[:-1]]
        if prompt_logprobs and not self.prompt_ids_in_choices:
            pieces += [b',"prompt_logprobs":', prompt_logprobs]
        pieces.append(b',"choices":[')
        for at, choice in enumerate(choices):
            pieces += [b",", *choice] if at else choice
        return [*pieces, b"]}"]

    @abstractmethod
    def choice_chunk(
        self, index: int, text: str | None, logprobs: orjson.Fragment | None, finish: str | None
    ) -> Json: ...

    def choice_whole(
        self,
        choice: ChoiceText,
        text: str,
        reasoning: str,
        logprobs: Sequence[Piece] = (b"null",),
        *,
        prompt_ids: Sequence[int] | None = None,
        prompt_logprobs: Piece = b"",
    ) -> list[Piece]:
        """A choice in pieces: copies of long log probabilities would stop all streams."""
        end: Json = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if prompt_ids is not None:
            end["token_ids"] = choice.take_ids()
            if self.prompt_ids_in_choices:
                end["prompt_token_ids"] = prompt_ids
        content = {"index": choice.index, **self.content(choice, text, reasoning), **end}
        shown = prompt_logprobs if self.prompt_ids_in_choices else b""
        of_prompt = [b',"prompt_logprobs":', shown] if shown else []
        return [orjson.dumps(content)[:-1], *of_prompt, b',"logprobs":', *logprobs, b"}"]

    @abstractmethod
    def content(self, choice: ChoiceText, text: str, reasoning: str, /) -> Json: ...

    def reasoning_event(
        self, index: int, reasoning: str, logprobs: orjson.Fragment | None, usage: Json | None
    ) -> bytes:
        """Only of a form whose answers may have reasoning."""
        raise NotImplementedError

    def call_event(self, index: int, call: CallDelta, logprobs: orjson.Fragment | None, usage: Json | None) -> bytes:
        """Only of a form whose requests may offer tools."""
        raise NotImplementedError


def usage(
    prompt_tokens: int, completion_tokens: int, *, cached_tokens: int | None, reasoning_tokens: int | None
) -> Json:
    """`cached_tokens`: None if no runner has said it. `reasoning_tokens`: None if nobody looks for reasoning."""
    counted: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        counted["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    if reasoning_tokens is not None:
        counted["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counted
