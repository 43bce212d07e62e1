"""Turns the prompts of both kinds of body into tokens."""

import asyncio
from collections.abc import Sequence

from motet.errors import ContextLengthExceeded, InvalidRequest
from motet_gateway.parameters import DEFAULT_COMPLETION_TOKENS, Body, ChatBody, CompletionBody, Tokens, check_tokens
from motet_gateway.tokens.chat_renderer import ChatRenderer
from motet_gateway.tokens.render_pool import encoded
from motet_gateway.tokens.text_model import ModelTokenizer

UNKNOWN_CONTEXT = 2048
"""The context length if neither the runner nor config.json has one."""


async def tokenise(body: Body, text: ModelTokenizer, renderer: ChatRenderer, *, threaded_bytes: int) -> list[Tokens]:
    """One list of tokens per prompt."""
    if isinstance(body, ChatBody):
        prompts = [await chat_prompt(body, text, renderer, threaded_bytes=threaded_bytes)]
    else:
        assert isinstance(body, CompletionBody)
        prompts = await completion_prompts(body, text, threaded_bytes=threaded_bytes)
    if (most := body.truncate_prompt_tokens) is not None:
        prompts = [prompt[-most:] for prompt in prompts]
    return prompts


async def chat_prompt(body: ChatBody, text: ModelTokenizer, renderer: ChatRenderer, *, threaded_bytes: int) -> Tokens:
    template = text.chat_template()
    context = encoded(
        body.plain_messages(),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        extra=body.chat_template_kwargs,
    )
    rendered = await renderer.render(template, context)
    # The chat template adds the special tokens itself.
    (tokens,) = await encode([rendered], text, special=bool(body.add_special_tokens), threaded_bytes=threaded_bytes)
    return _not_empty(tokens, "messages")


async def completion_prompts(body: CompletionBody, text: ModelTokenizer, *, threaded_bytes: int) -> list[Tokens]:
    prompts = body.prompts()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    special = body.add_special_tokens is not False
    encoded = iter(await encode(texts, text, special=special, threaded_bytes=threaded_bytes) if texts else ())
    return [
        _not_empty(next(encoded) if isinstance(prompt, str) else check_tokens(prompt, text, "prompt"), "prompt")
        for prompt in prompts
    ]


async def encode(texts: Sequence[str], text: ModelTokenizer, *, special: bool, threaded_bytes: int) -> list[Tokens]:
    """Encode texts, long ones in a thread, so that other streams' tokens do not wait for them."""
    if sum(map(len, texts)) <= threaded_bytes:
        return text.encode(texts, add_special_tokens=special)
    return await asyncio.to_thread(text.encode, texts, add_special_tokens=special)


def max_answer_tokens(body: Body, prompt: Tokens, context: int) -> int:
    """How many tokens the answer may have. Raises ContextLengthExceeded, with both numbers, if it can't fit."""
    field = "messages" if isinstance(body, ChatBody) else "prompt"
    size = len(prompt)
    if size >= context:
        raise ContextLengthExceeded(
            f"The prompt has {size} tokens, but this model's context is {context} tokens, answer included. "
            "Shorten the prompt.",
            param=field,
        )
    name, wanted = body.output_limit
    if wanted is None:
        usual = context if isinstance(body, ChatBody) else DEFAULT_COMPLETION_TOKENS
        return min(usual, context - size)
    if size + wanted > context:
        raise ContextLengthExceeded(
            f"The prompt has {size} tokens and {name} asks for {wanted} more, {size + wanted} together, but this "
            f"model's context is {context} tokens. Shorten the prompt or lower {name}.",
            param=name,
        )
    return wanted


def _not_empty(tokens: Tokens, field: str) -> Tokens:
    if not tokens:
        raise InvalidRequest(f"{field}: the prompt is empty", param=field)
    return tokens
