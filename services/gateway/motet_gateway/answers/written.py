"""What is written of a call in OpenAI's older APIs: the chunks of a stream, or the whole answer as JSON. Pure."""

from typing import Any

import orjson

from motet.errors import MotetError
from motet_gateway import sse
from motet_gateway.answers.call import Call
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.form import Form, usage
from motet_gateway.answers.logprobs import Columns
from motet_gateway.answers.parts import Reasoning, Scores, reasoning, scores, texts
from motet_gateway.answers.writer import AnswerWriter, Piece
from motet_gateway.parameters import ChoicesBody

_TIERS = {"interactive": "priority", "standard": "default", "batch": "flex"}
"""Of OpenAI, by the class that the request has got"""


class StreamEvents(AnswerWriter):
    def __init__(self, form: type[Form], call: Call) -> None:
        super().__init__(call)
        assert isinstance(call.body, ChoicesBody)
        self._usage = call.body.usage_wanted
        self._kind = form
        self._form: Form | None = None
        """From the time when there is something to write: then the model is known."""
        self._introduced: set[int] = set()
        self._texts_alone: set[int] = set()
        """Of these: until its end, there is nothing else to write of the choice."""

    def clear(self) -> None:
        super().clear()
        self._form = None  # another model, another fingerprint
        self._texts_alone.clear()  # it may reason

    def take(self) -> list[bytes]:
        parts: list[bytes] = []
        if not self._changed:
            return parts
        changed, self._changed = self._changed, {}
        form = self._made()
        usage_so_far = _usage_of(self._call) if self._usage.continuous_usage_stats else None
        for choice in changed.values():
            if choice.index in self._texts_alone and choice.finish is None:  # the frequent case
                parts += [form.text_event(choice.index, text) for text in texts(choice.take())]
            elif (echo := self._call.echo_of(choice)) is None or echo.ready:
                self._write(choice, form, parts, usage_so_far)
            else:
                self._changed[choice.index] = choice
        return parts

    def last(self) -> list[Piece]:
        if not self._usage.include_usage:
            return [sse.DONE]
        return [self._made().usage_event(_usage_of(self._call)), sse.DONE]

    def failed(self, error: MotetError) -> bytes:
        return sse.error_event(error) + sse.DONE

    def whole(self) -> list[Piece]:
        form, call = self._made(), self._call
        prompt_ids = list(call.prompts[0]) if call.body.token_ids_wanted else None
        scored = call.scored[0].json if call.scored else b""
        return form.whole([_whole_choice(call, one, form) for one in call.choices], _usage_of(call), prompt_ids, scored)

    def _made(self) -> Form:
        if self._form is None:
            call, wanted = self._call, self._usage
            assert call.target is not None
            in_chunks = wanted.include_usage or wanted.continuous_usage_stats
            self._form = self._kind(
                call.id,
                call.created,
                call.body.model,
                call.target.fingerprint,
                usage_in_chunks=in_chunks,
                tier=_TIERS[call.class_name] if call.body.service_tier else None,
            )
        return self._form

    def _write(self, choice: ChoiceText, form: Form, parts: list[bytes], usage_so_far: dict[str, Any] | None) -> None:
        body, ids = self._call.body, choice.take_ids()
        # Reasoning that has to come as a whole stays in the choice until its end.
        waits = choice.reasons and choice.finish is None and body.shows_reasoning and not body.streams_reasoning
        said = [] if waits else choice.take()
        if not body.shows_reasoning:
            said = [part for part in said if not isinstance(part, Reasoning)]
        if (said or ids or choice.finish is not None) and choice.index not in self._introduced:
            self._introduced.add(choice.index)
            if choice.plain and usage_so_far is None and not body.token_ids_wanted:
                self._texts_alone.add(choice.index)
            parts.append(form.opening(choice.index))
            if self._call.body.token_ids_wanted:
                parts.append(form.prompt_event(choice.index, list(self._call.prompt_of(choice))))
            if (echo := self._call.echo_of(choice)) is not None:
                shown = _as_json(choice, echo.logprobs) if echo.logprobs else None
                parts.append(form.full_event(choice.index, echo.text, shown, None, usage_so_far))
        shown = None
        for part in said:
            if isinstance(part, str):
                if shown is None and usage_so_far is None and not ids:
                    parts.append(form.text_event(choice.index, part))
                    continue
                parts.append(form.full_event(choice.index, part, shown, None, usage_so_far, ids=ids))
                ids = []
            elif isinstance(part, Reasoning):
                parts.append(form.reasoning_event(choice.index, part.text, shown, usage_so_far))
            elif isinstance(part, Scores):
                if shown is not None:  # of the end of a call, behind which something else begins
                    parts.append(form.full_event(choice.index, "", shown, None, usage_so_far))
                shown = _as_json(choice, part.columns)
                assert choice.logprobs is not None
                choice.logprobs.release(part.columns)
                continue
            else:
                parts.append(form.call_event(choice.index, part, shown, usage_so_far))
            shown = None
        if shown is not None or ids:
            parts.append(form.full_event(choice.index, "", shown, None, usage_so_far, ids=ids))
        if choice.finish is not None:
            parts.append(form.end_event(choice, usage_so_far))


def _whole_choice(call: Call, choice: ChoiceText, form: Form) -> list[Piece]:
    echo, said = call.echo_of(choice), choice.take()
    text = "".join([*([] if echo is None else [echo.text]), *texts(said)])
    thought = "".join(reasoning(said)) if call.body.shows_reasoning else ""
    prompt_ids = list(call.prompt_of(choice)) if call.body.token_ids_wanted else None
    scored = call.scored_of(choice)
    if choice.logprobs is None:
        return form.choice_whole(choice, text, thought, prompt_ids=prompt_ids, prompt_logprobs=scored)
    prompt = {} if echo is None else echo.logprobs
    logprobs = choice.logprobs.as_json(prompt, *scores(said))
    return form.choice_whole(choice, text, thought, logprobs, prompt_ids=prompt_ids, prompt_logprobs=scored)


def _as_json(choice: ChoiceText, logprobs: Columns) -> orjson.Fragment:
    assert choice.logprobs is not None
    return orjson.Fragment(b"".join(choice.logprobs.as_json(logprobs)))


def _usage_of(call: Call) -> dict[str, Any]:
    cached, reasoning = call.cached_tokens, call.reasoning_tokens
    return usage(call.prompt_tokens, call.tokens, cached_tokens=cached, reasoning_tokens=reasoning)
