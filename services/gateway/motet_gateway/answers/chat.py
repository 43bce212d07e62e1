"""/v1/chat/completions."""

from collections.abc import Callable

import orjson

from motet_gateway import sse
from motet_gateway.answers.api import Api
from motet_gateway.answers.form import Form, Json
from motet_gateway.answers.logprobs import CharacterCounter, ChatLogprobs
from motet_gateway.answers.prompts import Tokenising, not_empty
from motet_gateway.parameters import ChatBody, Tokens
from motet_gateway.tokens.render_pool import encoded
from motet_gateway.tokens.token_bytes import TokenBytes


async def chat_prompts(body: ChatBody, tokenising: Tokenising) -> list[Tokens]:
    """A chat has one prompt."""
    template = tokenising.model.chat_template()
    context = encoded(
        body.plain_messages(),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        extra=body.chat_template_kwargs,
    )
    rendered = await tokenising.renderer.render(template, context)
    # The chat template adds the special tokens itself.
    (tokens,) = await tokenising.encode([rendered], special=bool(body.add_special_tokens), field=body.prompt_field)
    return [not_empty(tokens, body.prompt_field)]


class ChatForm(Form):
    prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def opening(self, index: int, /) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return sse.event(self.chunk([choice]))

    def choice_chunk(self, index: int, text: str | None, logprobs: orjson.Fragment | None, finish: str | None) -> Json:
        delta = {} if text is None else {"content": text}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def content(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs_writer(
        self,
        token_bytes: TokenBytes,
        top: int,
        *,
        hold: Callable[[int], None],
        after: CharacterCounter | None,  # noqa: ARG002 a chat has no offsets
    ) -> ChatLogprobs:
        return ChatLogprobs(token_bytes, top, hold=hold)


CHAT = Api(ChatBody, ChatForm, chat_prompts)
