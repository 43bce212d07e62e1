"""The bytes that each token adds to a text. Decoding a single token does not give them: an incomplete character becomes
a replacement character, and some decoders drop the space before the first word.
"""

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content.encode() for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        steps = {step["type"]: step for step in _steps(tokenizer)}
        self._byte_level = "ByteLevel" in steps
        self._byte_fallback = "ByteFallback" in steps
        self._space = _space(steps)
        self._continues = str(steps["WordPiece"]["prefix"]) if "WordPiece" in steps else ""

    def special(self, token: int) -> bool:
        return token in self._special

    def of(self, token: int) -> bytes:
        """The token's bytes in the middle of a text."""
        if (added := self._added.get(token)) is not None:
            return added
        said = self._tokenizer.id_to_token(token)
        if said is None:
            return b""
        if self._byte_level and all(sign in _BYTE_OF for sign in said):
            return bytes(_BYTE_OF[sign] for sign in said)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(said)):
            return bytes([int(byte[1], 16)])
        if self._continues:
            begins = said.startswith(self._continues)
            return (said.removeprefix(self._continues) if begins else f" {said}").encode()
        return (said.replace(self._space, " ") if self._space else said).encode()


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
