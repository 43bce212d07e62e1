"""Text from tokens as they come, without half characters."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from motet_gateway.tokens.token_bytes import TokenBytes

CONTEXT_TOKENS = 8
"""Tokens of the prompt a decoder sees before the first one of the answer: whether that begins with a space depends on
what stands before it."""


class Detokenizer:
    """One per choice. Characters that are spread over several tokens appear with the last of them."""

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
            # Some decoders rewrite earlier text when a token follows (the stream calls that an invalid prefix). What
            # the client has cannot be taken back, so decoding starts afresh from these tokens.
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
        """What of its bytes the first token really adds: some decoders drop a space at the beginning."""
        alone = Detokenizer(self._tokenizer, self.context, skip_special_tokens=self._skip).feed([token])
        return spelled[1:] if spelled.startswith(b" ") and not alone.startswith(" ") else spelled

    def flush(self) -> str:
        """An answer may end within a character; what there is of it becomes a replacement mark, as in `decode`."""
        pending, self._pending = self._pending, []
        return self._tokenizer.decode(pending, skip_special_tokens=self._skip) if pending else ""
