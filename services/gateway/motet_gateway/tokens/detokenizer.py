"""Turns tokens into text as they arrive, without incomplete characters.

A token costs the same wherever it stands, also in an answer that ends within a character for a thousand tokens.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from motet_gateway.tokens.token_bytes import TokenBytes

CONTEXT_TOKENS = 8
"""How many tokens of the prompt the decoder gets first. Whether the answer begins with a space depends on them."""
HELD_TOKENS = 3
"""The most tokens that wait for the end of a character: it has at most four bytes, and a token at least one."""


class Detokenizer(Protocol):
    """One per choice. A character that is spread over several tokens appears with the last of them."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def flush(self) -> str:
        """The rest of the text: replacement characters for an incomplete character, as in `decode`."""

    @property
    def incomplete(self) -> bool:
        """Whether the last tokens end within a character."""

    def hides(self, token: int) -> bool: ...

    def begins(self, token: int) -> bytes:
        """The bytes that the first token adds. Some decoders drop a space at the beginning."""


def detokenizer(
    token_bytes: TokenBytes, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
) -> Detokenizer:
    kind = SpellingDetokenizer if token_bytes.exact else DecodingDetokenizer
    return kind(token_bytes, prompt_ids[-CONTEXT_TOKENS:], skip_special_tokens=skip_special_tokens)


def marks_of_broken_text(token_bytes: TokenBytes) -> str:
    """How this model's decoder shows bytes that are no character: the name of an error handler of `codecs`."""
    return EACH_BYTE if token_bytes.marks_each_byte else "replace"


class SpellingDetokenizer:
    """Joins the bytes of the tokens. For most models' tokenizers: see `TokenBytes.exact`."""

    __slots__ = ("_begun", "_bytes_of", "_errors", "_first", "_hides", "_rest", "_starts")

    def __init__(self, token_bytes: TokenBytes, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._hides = skip_special_tokens and token_bytes.special
        self._first = token_bytes.first
        self._bytes_of = (token_bytes.visible if skip_special_tokens else token_bytes.all).__getitem__
        self._errors = marks_of_broken_text(token_bytes)
        before = b"".join(map(self._bytes_of, context))
        self._starts = not before
        """Whether the answer is the beginning of the text."""
        self._begun = bool(before)
        _, used = codecs.utf_8_decode(before, self._errors, False)
        self._rest = before[used:]
        """The bytes of an incomplete character, at most three."""

    def feed(self, tokens: Sequence[int]) -> str:
        added = b"".join(map(self._bytes_of, tokens))
        if not self._begun and added:
            self._begun = True
            first = next(token for token in tokens if self._bytes_of(token))
            added = self._first(first) + added[len(self._bytes_of(first)) :]
        if self._rest:
            added = self._rest + added
        text, used = codecs.utf_8_decode(added, self._errors, False)
        self._rest = added[used:]
        return text

    def flush(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode(errors=self._errors)

    @property
    def incomplete(self) -> bool:
        return bool(self._rest)

    def hides(self, token: int) -> bool:
        return bool(self._hides and self._hides(token))

    def begins(self, token: int) -> bytes:
        return self._first(token) if self._starts else self._bytes_of(token)


class DecodingDetokenizer:
    """Decodes each token with a few tokens before it, whatever the tokenizer's decoder does."""

    __slots__ = ("_context", "_held", "_prompt", "_skip", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._token_bytes = token_bytes
        self._skip = skip_special_tokens
        self._prompt = list(context)
        self._context = self._prompt
        """The last tokens whose text is out."""
        self._held: list[int] = []

    def feed(self, tokens: Sequence[int]) -> str:
        ready = self._held + [token for token in tokens if not self.hides(token)]
        self._held = []
        text = self._text_of(ready)
        if text.endswith("\ufffd"):
            self._held = ready[-HELD_TOKENS:]
            ready = ready[:-HELD_TOKENS]
            text = self._text_of(ready)
        self._context = [*self._context, *ready][-CONTEXT_TOKENS:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, []
        return self._text_of(held)

    @property
    def incomplete(self) -> bool:
        return bool(self._held)

    def hides(self, token: int) -> bool:
        return self._skip and self._token_bytes.special(token)

    def begins(self, token: int) -> bytes:
        spelled = self._token_bytes.of(token)
        alone = DecodingDetokenizer(self._token_bytes, self._prompt, skip_special_tokens=self._skip).feed([token])
        return spelled[1:] if spelled.startswith(b" ") and not alone.startswith(" ") else spelled

    def _text_of(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        before, after = self._decoded(self._context), self._decoded(self._context + tokens)
        # Some decoders change earlier text when a token follows. The client already has that text.
        return after[len(before) :] if after.startswith(before) else self._decoded(tokens)

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self._token_bytes.tokenizer.decode(tokens, skip_special_tokens=self._skip)
        return text


def _mark_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


EACH_BYTE = "motet-each-byte"
codecs.register_error(EACH_BYTE, _mark_each_byte)
