"""Cuts long texts where it does not change their tokens. The library takes some 200 bytes of memory for each byte that
it tokenises at once. Pure.
"""

import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from motet_gateway.tokens.text_bounds import parts_of

PIECE_CHARACTERS = 64 * 1024
_LOOK_AHEAD = 64 * 1024
"""How far one search goes. Nothing else runs meanwhile."""
_BORDER = re.compile(r"[A-Za-z](?= [A-Za-z])|\n(?=[A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3])")
"""Ends between a letter and a space with another letter, or between the end of a line and a letter."""
_PROBE = "It's one two  three\n\nfour five.\n六 seven_8 Nine-ten's\n\telf 'twelve\n각 é thirteen (fourteen)\nfifteen"


def can_be_cut(tokenizer: Tokenizer) -> bool:
    """Whether a text may be tokenised in pieces: its words are tokenised one by one, and each border that `_BORDER`
    finds is one between words. So it is with all patterns in the manner of GPT-2."""
    normalizers, pre_tokenizers, _ = parts_of(tokenizer)
    if tokenizer.pre_tokenizer is None or any(step["type"] not in {"NFC", "NFD"} for step in normalizers):
        return False
    if any(step["type"] not in {"Split", "Digits", "ByteLevel"} for step in pre_tokenizers):
        return False
    if any(step.get("add_prefix_space") for step in pre_tokenizers):
        return False
    if any(_crosses_borders(token) for token in tokenizer.get_added_tokens_decoder().values()):
        return False
    words = {start for _, (start, _) in tokenizer.pre_tokenizer.pre_tokenize_str(_PROBE)}
    return {found.end() for found in _BORDER.finditer(_PROBE)} <= words


def _crosses_borders(token: Any) -> bool:
    text = token.content
    takes_spaces = (token.lstrip and text[:1].isalpha()) or (token.rstrip and text[-1:].isalpha())
    return bool(takes_spaces or token.single_word or _BORDER.search(text))


def pieces(text: str) -> Iterator[str]:
    """Each is at least as long as `PIECE_CHARACTERS`, but for the last one; longer where there is no border."""
    start, at = 0, PIECE_CHARACTERS
    while at < len(text):
        if (border := _BORDER.search(text, at, at + _LOOK_AHEAD)) is None:
            at += _LOOK_AHEAD - 2  # a border may lie across the end of the search
            continue
        yield text[start : border.end()]
        start, at = border.end(), border.end() + PIECE_CHARACTERS
    yield text[start:]
