"""How many bytes of a text one token can stand for. A text with more bytes than a context of such tokens does not fit,
which is known before it is tokenised. Pure.
"""

import json
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

from motet_gateway.tokens.token_bytes import SIGNS

NORMAL_FORM_SHRINKS = 3
"""Canonical normal forms divide a text's bytes by at most this: the sign for Kelvin takes three bytes, a K one."""
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation", "UnicodeScripts"})

Step = dict[str, Any]
"""A normalizer or a pre-tokenizer, as in tokenizer.json."""


def most_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """None if there is no bound: the tokenizer may drop text, or make one token of any unknown word."""
    normalizers, pre_tokenizers, model = parts_of(tokenizer)
    if not all(_keeps_text(step) for step in (*normalizers, *pre_tokenizers)):
        return None
    if not _spells_every_byte(tokenizer, model, (*normalizers, *pre_tokenizers)):
        return None
    forms = sum(step["type"] in {"NFC", "NFD"} for step in normalizers)
    longest: int = max(len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True))
    shrinks: int = NORMAL_FORM_SHRINKS**forms
    return longest * shrinks


def counted_bytes(text: str, *, without_spaces: bool) -> int:
    """`without_spaces`: white space does not count."""
    counted = "".join(text.split()) if without_spaces else text
    return len(counted) if counted.isascii() else len(counted.encode(errors="replace"))


def takes_spaces(tokenizer: Tokenizer) -> bool:
    """Whether some tokens take all white space beside them."""
    return any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())


def parts_of(tokenizer: Tokenizer) -> tuple[list[Step], list[Step], dict[str, Any]]:
    """The normalizers, the pre-tokenizers and the model."""
    parts = json.loads(tokenizer.to_str())
    return _flat(parts["normalizer"]), _flat(parts["pre_tokenizer"]), parts["model"]


def _flat(step: Step | None) -> list[Step]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    inner: Iterable[Step] = step.get("normalizers") or step.get("pretokenizers") or ()
    return [each for one in inner for each in _flat(one)]


def _keeps_text(step: Step) -> bool:
    match step:
        case {"type": "NFC" | "NFD" | "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": str(before)}, "content": str(after)}:
            return len(after.encode()) >= len(before.encode())
        case {"type": kind}:
            return kind in _KEEPING_PRE_TOKENIZERS and step.get("behavior") != "Removed"
        case _:
            return False


def _spells_every_byte(tokenizer: Tokenizer, model: dict[str, Any], steps: Iterable[Step]) -> bool:
    if model["type"] not in {"BPE", "Unigram"}:
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        signs: Iterable[str] = SIGNS
    elif model.get("byte_fallback"):
        signs = (f"<0x{byte:02X}>" for byte in range(256))
    else:
        return False
    return all(tokenizer.token_to_id(sign) is not None for sign in signs)
