"""The bytes that each token adds to a text. Decoding a single token does not give them: an incomplete character becomes
a replacement character, and some decoders drop the space before the first word.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PIECES = ("Replace", "ByteFallback", "Fuse", "Strip")
"""The steps of decoders for vocabularies of SentencePiece, in this order; some have only a part of them."""


class TokenBytes:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token: one.content for token, one in added.items()}
        self._special = {token for token, one in added.items() if one.special}
        steps = _steps(tokenizer)
        by_type = {step["type"]: step for step in steps}
        self._byte_level = "ByteLevel" in by_type
        self._byte_fallback = "ByteFallback" in by_type
        self._space = _space(by_type)
        self._continues = str(by_type["WordPiece"]["prefix"]) if "WordPiece" in by_type else ""
        self._strips_space = "Strip" in by_type
        self._drops_spaces = "Metaspace" in by_type and by_type["Metaspace"].get("prepend_scheme") != "never"
        self.exact = _is_exact(steps)
        """Whether the bytes of tokens, joined, are all that the tokenizer's decoder makes of them. Otherwise it changes
        a text depending on which tokens stand beside each other."""
        self.marks_each_byte = self._byte_fallback
        """Whether the decoder writes a replacement character for every byte of an incomplete character."""
        self.all = _Memo(self._spell)
        """The bytes of each token in the middle of a text."""
        self.visible = _Memo(lambda token: b"" if token in self._special else self.all[token])
        """The same where special tokens are hidden."""

    @property
    def specials(self) -> frozenset[int]:
        return frozenset(self._special)

    def special(self, token: int) -> bool:
        return token in self._special

    def of(self, token: int) -> bytes:
        """The token's bytes in the middle of a text."""
        return self.all[token]

    def first(self, token: int) -> bytes:
        """The token's bytes at the beginning of a text. Only where `exact`."""
        if self._drops_spaces:
            return (self._said(token) or "").replace(self._space, "").encode()
        return self.of(token).removeprefix(b" ") if self._strips_space else self.of(token)

    def _said(self, token: int) -> str | None:
        added = self._added.get(token)
        said: str | None = self.tokenizer.id_to_token(token) if added is None else added
        return said

    def _spell(self, token: int) -> bytes:
        if (said := self._said(token)) is None:
            return b""
        if self._byte_level and all(sign in _BYTE_OF for sign in said):
            return bytes(_BYTE_OF[sign] for sign in said)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(said)):
            return bytes([int(byte[1], 16)])
        if self._continues and token not in self._added:
            begins = said.startswith(self._continues)
            return (said.removeprefix(self._continues) if begins else f" {said}").encode()
        return (said.replace(self._space, " ") if self._space else said).encode()


class _Memo(dict[int, bytes]):
    """Computes each value once. It has at most as many as the vocabulary."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token: int) -> bytes:
        value = self._compute(token)
        if value:  # a number outside of the vocabulary is not kept
            self[token] = value
        return value


def readable(spelled: bytes) -> str:
    """The token as text, as OpenAI shows it: bytes that are not valid UTF-8 are shown one by one."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _is_exact(steps: list[dict[str, Any]]) -> bool:
    types = [str(step["type"]) for step in steps]
    if types in (["ByteLevel"], ["Metaspace"]):
        return True
    if not types or types != [name for name in _PIECES if name in types]:
        return False
    by_type = dict(zip(types, steps, strict=True))
    replace, strip = by_type.get("Replace"), by_type.get("Strip")
    if replace is not None and not (replace["content"] == " " and "String" in replace["pattern"]):
        return False
    # Without Fuse it strips each token.
    return strip is None or ("Fuse" in types and (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0))


def _space(steps: dict[str, dict[str, Any]]) -> str:
    if "Metaspace" in steps:
        return str(steps["Metaspace"]["replacement"])
    replaced = steps.get("Replace", {})
    return str(replaced["pattern"].get("String", "")) if replaced.get("content") == " " else ""


def _signs() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself, or one from 256 upwards."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _signs()
SIGNS = tuple(_BYTE_OF)
"""The characters for all bytes."""
