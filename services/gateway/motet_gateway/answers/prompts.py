"""Turns the texts of prompts into tokens, within the model's context."""

from collections.abc import Sequence
from dataclasses import dataclass

from motet.chat_formats import UNDECLARED, ChatFormats
from motet.errors import ContextLengthExceeded, InvalidRequest, RequestTooLarge
from motet_gateway.parameters import Body, Tokens
from motet_gateway.tokens.chat_renderer import ChatRenderer
from motet_gateway.tokens.encoder import Encoder
from motet_gateway.tokens.text_model import KEEP_ALL, Keep, ModelTokenizer, TooManyTokens

USUAL_ROOM = 16
"""For an answer whose length the client does not limit, where its prompt is cut to fit"""
UNKNOWN_CONTEXT = 2048
"""The context length if neither the runner nor config.json has one."""


@dataclass(frozen=True, slots=True)
class Tokenising:
    """The model whose tokens are wanted, what makes them, and which ones are kept."""

    model: ModelTokenizer
    renderer: ChatRenderer
    encoder: Encoder
    formats: ChatFormats = UNDECLARED
    keep: Keep = KEEP_ALL
    tenant: str = ""
    """Who asks"""

    async def encode(self, texts: Sequence[str], *, special: bool, field: str) -> Sequence[Tokens]:
        """Raises ContextLengthExceeded for a text that cannot fit into what is kept."""
        if self.keep.most is not None:
            for one in texts:
                _check_bytes(one, self.model, self.keep.most, field)
        try:
            return await self.encoder.encode(texts, self.model, special=special, tenant=self.tenant, keep=self.keep)
        except TooManyTokens as error:
            raise ContextLengthExceeded(
                f"The prompt has more than {error.seen - 1} tokens, but this model's context is {self.keep.most} "
                "tokens, answer included. Shorten the prompt.",
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


def kept_tokens(body: Body, context: int) -> Keep:
    """Of each prompt, as far as the client lets it be cut."""
    size = body.truncate_prompt_tokens
    if size is None:
        return Keep(most=context)
    if size < 0:
        size = max(1, context - (body.output_limit[1] or body.usual_tokens or USUAL_ROOM))
    return Keep(first=size) if body.truncation_side == "right" else Keep(last=size)


def max_answer_tokens(body: Body, prompt: Tokens, context: int) -> int:
    """How many tokens the answer may have. Raises ContextLengthExceeded, with both numbers, if it can't fit."""
    size = len(prompt)
    if size >= context:
        raise ContextLengthExceeded(
            f"The prompt has {size} tokens, but this model's context is {context} tokens, answer included. "
            "Shorten the prompt.",
            param=body.prompt_field,
        )
    name, wanted = body.output_limit
    if wanted is None:
        return min(body.usual_tokens or context, context - size)
    if size + wanted > context and body.fills_context:
        return context - size
    if size + wanted > context:
        raise ContextLengthExceeded(
            f"The prompt has {size} tokens and {name} asks for {wanted} more, {size + wanted} together, but this "
            f"model's context is {context} tokens. Shorten the prompt or lower {name}.",
            param=name,
        )
    return wanted


def not_empty(tokens: Tokens, field: str) -> Tokens:
    if not tokens:
        raise InvalidRequest(f"{field}: the prompt is empty", param=field)
    return tokens
