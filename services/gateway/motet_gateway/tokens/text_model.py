"""A model's tokenizer, chat template and sampling defaults, read from a folder of assets. No weights."""

import copy
import os
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer

from motet.adapter_template import SPECIAL_TOKENS, token_text
from motet.asset_fields import AssetFields
from motet.chat_environment import reads
from motet.errors import Internal, InvalidRequest, ModelFolderError, RequestTooLarge
from motet.tool_calls.formats import ToolFormatName, format_of_template
from motet_gateway.tokens.own_template import OwnTemplate
from motet_gateway.tokens.render_pool import TemplateText
from motet_gateway.tokens.text_bounds import counted_bytes, most_bytes_per_token, takes_spaces
from motet_gateway.tokens.text_pieces import PIECE_CHARACTERS, borders, pieces
from motet_gateway.tokens.token_bytes import TokenBytes

# A text is encoded in the thread that asks for it. Otherwise the library has as many threads as the machine has cores,
# and each of them keeps memory.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MAX_UNCUT_BYTES = 512 * 1024
"""The most bytes of a text that are encoded at once. A longer text is cut where that does not change its tokens."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What is wanted of a text's tokens."""

    most: int | None = None
    """A text of more tokens is refused with `TooManyTokens`, mostly before all of it is encoded."""
    last: int | None = None
    """Only the last ones. The tokens that the tokenizer adds to a text stay."""
    first: int | None = None
    """Only the first ones; these stay, too."""

    def cut(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[-self.last :] if self.last is not None else tokens[: self.first]


KEEP_ALL = Keep()


class TooManyTokens(Exception):
    def __init__(self, seen: int) -> None:
        super().__init__(f"at least {seen} tokens")
        self.seen = seen


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    tokenizer: Tokenizer
    template: TemplateText | None
    vocabulary: int
    context_length: int
    """0 when config.json does not say."""
    eos_ids: frozenset[int] = frozenset()
    defaults: dict[str, Any] = field(default_factory=dict)
    """Of sampling, from generation_config.json. The client's values override them."""
    file: Path = Path()
    """The tokenizer's"""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """By the names that chat templates know"""
    token_bytes: TokenBytes = field(init=False, repr=False, compare=False)
    bytes_per_token: int | None = field(init=False, repr=False, compare=False)
    """The most bytes of a text that one token stands for; None: no bound is known."""
    tool_format: ToolFormatName | None = field(init=False, repr=False, compare=False)
    """In which the model calls tools, as its chat template shows it."""
    shows_tools: bool = field(init=False, repr=False, compare=False)
    """Whether its chat template writes the tools that a request offers."""
    _takes_spaces: bool = field(init=False, repr=False, compare=False)
    _border: re.Pattern[str] | None = field(init=False, repr=False, compare=False)
    """Where a text can be cut."""
    _frame: tuple[list[int], list[int]] | None = field(init=False, repr=False, compare=False)
    """The special tokens before and after a text, if they are known."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_bytes", TokenBytes(self.tokenizer))
        object.__setattr__(self, "bytes_per_token", most_bytes_per_token(self.tokenizer))
        shown = format_of_template(self.template.text) if self.template is not None else None
        object.__setattr__(self, "tool_format", shown)
        object.__setattr__(self, "shows_tools", self.template is not None and reads(self.template.text, "tools"))
        object.__setattr__(self, "_takes_spaces", takes_spaces(self.tokenizer))
        object.__setattr__(self, "_border", borders(self.tokenizer))
        object.__setattr__(self, "_frame", self._special_tokens())

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exceptions
            raise Internal(f"the model's tokenizer.json cannot be read: {error}") from None
        # A tokenizer saved from training may cut or fill every text to one length.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        try:
            fields = AssetFields(folder)
        except ModelFolderError as error:
            raise Internal(error.message) from None
        special = {name: token_text(fields.tokenizer.get(name)) for name in SPECIAL_TOKENS}
        return cls(
            tokenizer,
            TemplateText(fields.chat_template, special) if fields.chat_template else None,
            tokenizer.get_vocab_size(with_added_tokens=True),
            fields.context_length,
            fields.eos_ids,
            fields.sampling,
            folder / "tokenizer.json",
            special,
        )

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool, keep: Keep = KEEP_ALL) -> "list[array[int]]":
        return [self._encode(text, add_special_tokens=add_special_tokens, keep=keep) for text in texts]

    def words(self, texts: Sequence[str]) -> "list[array[int]]":
        """As an answer may have them: by themselves, and behind a blank."""
        both = [f"{blank}{one.lstrip()}" for one in texts for blank in ("", " ")]
        unlike = {encoded.tobytes(): encoded for encoded in self.encode(both, add_special_tokens=False) if encoded}
        return list(unlike.values())

    def counted_bytes(self, text: str) -> int:
        """The bytes of a text that each need a part of a token."""
        return counted_bytes(text, without_spaces=self._takes_spaces)

    def _encode(self, text: str, *, add_special_tokens: bool, keep: Keep) -> "array[int]":
        before, after = (self._frame or ([], [])) if add_special_tokens else ([], [])
        if self._frame is None or self._border is None or len(text) <= PIECE_CHARACTERS:
            ids = array("I", self._encode_uncut(text, add_special_tokens=add_special_tokens))
            ids = ids[len(before) : len(ids) - len(after)]
        else:
            ids = array("I")
            for piece in pieces(text, self._border):
                ids.extend(self._encode_uncut(piece, add_special_tokens=False))
                if keep.most is not None and len(before) + len(ids) > keep.most:
                    raise TooManyTokens(len(before) + len(ids))
                if keep.last is not None:
                    del ids[: -keep.last]
                if keep.first is not None and len(ids) >= keep.first:
                    break
        added = len(before) + len(after)
        size = keep.last or keep.first
        if size is not None and added + len(ids) > size:
            own = max(1, size - added)
            ids = ids[-own:] if keep.last is not None else ids[:own]
        return array("I", before) + ids + array("I", after)

    def _encode_uncut(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > MAX_UNCUT_BYTES // 4 and len(text.encode(errors="replace")) > MAX_UNCUT_BYTES:
            raise RequestTooLarge(
                f"The prompt has more than {MAX_UNCUT_BYTES} bytes of text in one piece, which takes too much memory "
                "to tokenise. Shorten it, break its lines, or send token ids."
            )
        # As a batch: only batch calls let other threads run meanwhile.
        (encoded,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def _special_tokens(self) -> tuple[list[int], list[int]] | None:
        plain, framed = (self._encode_uncut("a", add_special_tokens=special) for special in (False, True))
        for at in range(len(framed) - len(plain) + 1):
            if framed[at : at + len(plain)] == plain:
                return framed[:at], framed[at + len(plain) :]
        return None

    def decode(self, texts: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        decoded: list[str] = self.tokenizer.decode_batch(texts, skip_special_tokens=skip_special_tokens)
        return decoded

    def specials_but(self, signs: Iterable[str]) -> frozenset[int]:
        """All special tokens but these."""
        return self.token_bytes.specials - {self.tokenizer.token_to_id(sign) for sign in signs}

    def chat_template(self, of_request: str = "", tenant: str = "") -> TemplateText:
        """The request's own, or the model's."""
        if of_request:
            return TemplateText(of_request, self.special_tokens, brought_by=tenant)
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template; send plain text to /v1/completions", param="messages"
            )
        return self.template

    def with_template(self, template: OwnTemplate, namespace: str) -> Self:
        """The same tokens with the chat template of an adapter of this namespace. It costs no copy of the tokenizer."""
        own = copy.copy(self)
        object.__setattr__(own, "template", template.text_of(namespace))
        object.__setattr__(own, "special_tokens", template.special_tokens)
        object.__setattr__(own, "tool_format", template.tool_format)
        object.__setattr__(own, "shows_tools", template.shows_tools)
        return own
