"""Prompts as tokens, for both kinds of body."""

import asyncio
from collections.abc import Callable

from motet.errors import ContextLengthExceeded, InvalidRequest
from motet_gateway.parameters import DEFAULT_COMPLETION_TOKENS, Body, ChatBody, CompletionBody, Tokens, check_tokens
from motet_gateway.tokens.text_model import TextModel

UNKNOWN_CONTEXT = 2048
"""Stands in when neither the runner nor config.json says how long a context may be."""


async def tokenise(body: Body, text: TextModel, *, in_thread: bool) -> list[Tokens]:
    """One list of tokens per prompt. Long ones are made in a thread: other streams' tokens should not wait for them."""
    make: Callable[[], list[Tokens]]
    if isinstance(body, ChatBody):
        make = lambda: [chat_prompt(body, text)]  # noqa: E731
    else:
        assert isinstance(body, CompletionBody)
        make = lambda: completion_prompts(body, text)  # noqa: E731
    prompts = await asyncio.to_thread(make) if in_thread else make()
    if (most := body.truncate_prompt_tokens) is not None:
        prompts = [prompt[-most:] for prompt in prompts]
    return prompts


def chat_prompt(body: ChatBody, text: TextModel) -> Tokens:
    rendered = text.chat_template().render(
        body.plain_messages(),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        extra=body.chat_template_kwargs,
    )
    # The template writes the special tokens itself.
    return _not_empty(text.encode(rendered, add_special_tokens=bool(body.add_special_tokens)), "messages")


def completion_prompts(body: CompletionBody, text: TextModel) -> list[Tokens]:
    special = body.add_special_tokens is not False
    return [
        _not_empty(
            text.encode(prompt, add_special_tokens=special)
            if isinstance(prompt, str)
            else check_tokens(prompt, text, "prompt"),
            "prompt",
        )
        for prompt in body.prompts()
    ]


def room_for_answer(body: Body, prompt: Tokens, context: int) -> int:
    """The most tokens the answer may have. Raises ContextLengthExceeded, with both numbers, when it cannot fit."""
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
