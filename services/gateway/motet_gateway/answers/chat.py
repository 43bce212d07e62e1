"""/v1/chat/completions."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import orjson

from motet.errors import InvalidRequest, UnsupportedParameter
from motet.tool_calls.formats import FORMATS, known_format
from motet.tool_calls.parser import CallDelta
from motet_gateway import sse
from motet_gateway.answers.api import Api
from motet_gateway.answers.choice import ChoiceText
from motet_gateway.answers.conversation import Conversation
from motet_gateway.answers.form import Form, Json
from motet_gateway.answers.logprobs import ChatLogprobs
from motet_gateway.answers.prompts import Tokenising, not_empty
from motet_gateway.answers.written import StreamEvents
from motet_gateway.parameters import ChatBody, Tokens
from motet_gateway.reasoning import effort_variables
from motet_gateway.tokens.content_parts import as_read, reads_parts
from motet_gateway.tokens.render_pool import TemplateText, encoded
from motet_gateway.tools.written_out import written_out


async def chat_prompts(body: Conversation, tokenising: Tokenising) -> list[Tokens]:
    """A conversation is one prompt."""
    offered = body.tools_offered
    template = _template_of(body, tokenising)
    parts = reads_parts(template.text)
    # Wrong ones are refused before a process is asked about the template.
    messages = body.plain_messages(parts=parts) if isinstance(body, ChatBody) else body.plain_messages()
    extra = body.chat_template_kwargs
    if tokenising.formats.reasoning and body.effort is not None:
        extra = effort_variables(body.effort) | (extra or {})
    form = known_format(tokenising.formats.tool)
    if form is not None and not await tokenising.renderer.shows_tools(template, tokenising.model):
        tools = offered.said if offered is not None else ()
        renderer, tenant = tokenising.renderer, tokenising.tenant
        takes_system = not tools or await renderer.takes_system(template, extra, tenant=tenant)
        texts = body.plain_messages() if parts else messages
        messages = written_out(texts, tools, FORMATS[form], takes_system=takes_system)
    elif offered is not None:
        extra = {**(extra or {}), "tools": offered.said}
    if isinstance(body, ChatBody) and body.documents:
        if "documents" not in template.text:
            raise UnsupportedParameter(
                "documents: the chat template does not read them; put their text into a message",
                param="documents",
            )
        extra = {**(extra or {}), "documents": body.documents}
    with _named(body.prompt_field):
        context = encoded(
            as_read(template.text, messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            extra=extra,
        )
        rendered = await tokenising.renderer.render(template, context, tenant=tokenising.tenant)
    # The chat template adds the special tokens itself.
    (tokens,) = await tokenising.encode([rendered], special=bool(body.add_special_tokens), field=body.prompt_field)
    return [not_empty(tokens, body.prompt_field)]


def _template_of(body: Conversation, tokenising: Tokenising) -> TemplateText:
    own = body.chat_template if isinstance(body, ChatBody) else None
    if own and not tokenising.formats.request_templates:
        raise UnsupportedParameter(
            "chat_template: the pool of this model permits none; leave it out, or have spec.chat.requestTemplates of "
            "the pool set to true",
            param="chat_template",
        )
    return tokenising.model.chat_template(own or "", tokenising.tenant)


@contextmanager
def _named(field: str) -> Iterator[None]:
    """What renders a conversation calls it `messages`. In some APIs the field has another name."""
    try:
        yield
    except InvalidRequest as error:
        if error.param != "messages":
            raise
        why = error.message
        own = f"{field}{why.removeprefix('messages')}" if why.startswith("messages") else why
        raise type(error)(own, param=field) from None


class ChatForm(Form):
    prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"
    prompt_ids_in_choices = False

    def opening(self, index: int, /) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return sse.event(self.chunk([choice]))

    def choice_chunk(self, index: int, text: str | None, logprobs: orjson.Fragment | None, finish: str | None) -> Json:
        delta = {} if text is None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def content(self, choice: ChoiceText, text: str, reasoning: str, /) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if reasoning or choice.calls:
            message["content"] = text or None
        if reasoning:
            message |= _reasoning(reasoning)
        if choice.calls:
            message["tool_calls"] = [_call(call.id, call.name, call.arguments) for call in choice.calls]
        return {"message": message}

    def reasoning_event(
        self, index: int, reasoning: str, logprobs: orjson.Fragment | None, usage: Json | None
    ) -> bytes:
        choice = {"index": index, "delta": _reasoning(reasoning), "logprobs": logprobs, "finish_reason": None}
        return sse.event(self.chunk([choice], usage))

    def call_event(self, index: int, call: CallDelta, logprobs: orjson.Fragment | None, usage: Json | None) -> bytes:
        new = _call(call.id, call.name, call.arguments) if call.id else {"function": {"arguments": call.arguments}}
        delta = {"tool_calls": [{"index": call.index, **new}]}
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return sse.event(self.chunk([choice], usage))


def _reasoning(text: str) -> Json:
    """By both names that clients know."""
    return {"reasoning_content": text, "reasoning": text}


def _call(name_of_call: str, tool: str, arguments: str) -> Json:
    return {"id": name_of_call, "type": "function", "function": {"name": tool, "arguments": arguments}}


CHAT = Api(ChatBody, chat_prompts, ChatLogprobs, partial(StreamEvents, ChatForm))
