"""Turns the prompts of both kinds of body into tokens."""

from collections.abc import Sequence

from motet.errors import ContextLengthExceeded, InvalidRequest, RequestTooLarge
from motet.sampling import check_tokens
from motet_gateway.parameters import DEFAULT_COMPLETION_TOKENS, Body, ChatBody, CompletionBody, Tokens
from motet_gateway.tokens.chat_renderer import ChatRenderer
from motet_gateway.tokens.encoder import Encoder
from motet_gateway.tokens.render_pool import encoded
from motet_gateway.tokens.text_model import KEEP_ALL, Keep, ModelTokenizer, TooManyTokens

UNKNOWN_CONTEXT = 2048
"""The context length if neither the runner nor config.json has one."""


async def tokenise(
    body: Body, text: ModelTokenizer, renderer: ChatRenderer, encoder: Encoder, *, context: int | None = None
) -> list[Tokens]:
    """One list of tokens per prompt. Raises ContextLengthExceeded for a text that cannot fit into `context`."""
    last = body.truncate_prompt_tokens
    keep = Keep(most=context) if last is None else Keep(last=last)
    if isinstance(body, ChatBody):
        prompts = [await chat_prompt(body, text, renderer, encoder, keep=keep)]
    else:
        assert isinstance(body, CompletionBody)
        prompts = await completion_prompts(body, text, encoder, keep=keep)
    return prompts if last is None else [prompt[-last:] for prompt in prompts]


async def chat_prompt(
    body: ChatBody, text: ModelTokenizer, renderer: ChatRenderer, encoder: Encoder, *, keep: Keep = KEEP_ALL
) -> Tokens:
    template = text.chat_template()
    context = encoded(
        body.plain_messages(),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        extra=body.chat_template_kwargs,
    )
    rendered = await renderer.render(template, context)
    # The chat template adds the special tokens itself.
    special = bool(body.add_special_tokens)
    (tokens,) = await _encode([rendered], text, encoder, special=special, keep=keep, field="messages")
    return _not_empty(tokens, "messages")


async def completion_prompts(
    body: CompletionBody, text: ModelTokenizer, encoder: Encoder, *, keep: Keep = KEEP_ALL
) -> list[Tokens]:
    prompts = body.prompts()
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    special = body.add_special_tokens is not False
    encoded = iter(await _encode(texts, text, encoder, special=special, keep=keep, field="prompt") if texts else ())
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_tokens("prompt", prompt, text.vocabulary)
    return [_not_empty(next(encoded) if isinstance(prompt, str) else prompt, "prompt") for prompt in prompts]


async def _encode(
    texts: Sequence[str], text: ModelTokenizer, encoder: Encoder, *, special: bool, keep: Keep, field: str
) -> Sequence[Tokens]:
    if keep.most is not None:
        for one in texts:
            _check_bytes(one, text, keep.most, field)
    try:
        return await encoder.encode(texts, text, special=special, keep=keep)
    except TooManyTokens as error:
        raise ContextLengthExceeded(
            f"The prompt has more than {error.seen - 1} tokens, but this model's context is {keep.most} tokens, answer "
            "included. Shorten the prompt.",
            param=field,
        ) from None
    except RequestTooLarge as error:
        error.param = field
        raise


def _check_bytes(text: str, model: ModelTokenizer, context: int, field: str) -> None:
    """Refuse a text that does not fit whatever its tokens are: tokenising it costs much time and memory."""
    each = model.bytes_per_token
    if each is None or 4 * len(text) <= context * each:  # a character has at most four bytes
        return
    if (size := model.counted_bytes(text)) > context * each:
        raise ContextLengthExceeded(
            f"The prompt has {size} bytes, but this model's context is {context} tokens of at most {each} bytes each, "
            "answer included. It was counted in bytes, before it was tokenised. Shorten the prompt.",
            param=field,
        )


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
