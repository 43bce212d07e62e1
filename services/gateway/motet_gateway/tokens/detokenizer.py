"""Turns tokens into text as they arrive, without incomplete characters."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from motet_gateway.tokens.token_bytes import TokenBytes

CONTEXT_TOKENS = 8
"""How many tokens of the prompt the decoder gets first. Whether the answer begins with a space depends on them."""


class Detokenizer:
    """One per choice. A character that is spread over several tokens appears with the last of them."""

    __slots__ = ("_pending", "_skip", "_stream", "_tokenizer", "context")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self.context = list(prompt_ids[-CONTEXT_TOKENS:])
        self._stream = DecodeStream(self.context, skip_special_tokens)
        self._pending: list[int] = []

    def feed(self, tokens: list[int]) -> str:
        """The text that these tokens complete."""
        try:
            text: str | None = self._stream.step(self._tokenizer, tokens)
        except Exception:
            # Some decoders change earlier text when a token follows (an "invalid prefix"). The client already has
            # that text, so decoding starts again from these tokens.
            self._stream = DecodeStream([], self._skip)
            text = self._stream.step(self._tokenizer, tokens)
        if text is None:
            self._pending.extend(tokens)
            return ""
        if self._pending:
            self._pending.clear()
        return text

    def hides(self, token_bytes: TokenBytes, token: int) -> bool:
        return self._skip and token_bytes.special(token)

    def begins(self, token: int, spelled: bytes) -> bytes:
        """The bytes that the first token adds. Some decoders drop a space at the beginning."""
        alone = Detokenizer(self._tokenizer, self.context, skip_special_tokens=self._skip).feed([token])
        return spelled[1:] if spelled.startswith(b" ") and not alone.startswith(" ") else spelled

    def flush(self) -> str:
        """The rest of the text. An incomplete character becomes a replacement character, as in `decode`."""
        pending, self._pending = self._pending, []
        return self._tokenizer.decode(pending, skip_special_tokens=self._skip) if pending else ""
