"""Cuts long texts where it does not change their tokens. The library takes some 200 bytes of memory for each byte that
it tokenises at once. Pure.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unicodedata import normalize

from tokenizers import Tokenizer

from motet_gateway.tokens.text_bounds import parts_of

PIECE_CHARACTERS = 64 * 1024
_LOOK_AHEAD = 64 * 1024
"""How far one search goes. Nothing else runs meanwhile."""
_SCRIPTS = (
    ("A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff", "one Việt ạ"),
    ("\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03ce", "και Ένα λόγος"),
    ("\u0400-\u0481\u048a-\u052f", "Это ещё мир"),
    ("\u0531-\u0556\u0561-\u0586", "Բարեւ եւ մեկ"),
    ("\u05d0-\u05ea", "שלום בְּרֵאשִׁית אחד"),
    ("\u0620-\u063f\u0641-\u064a\u0671-\u06d3", "واحد كِتَاب این"),
    ("\u0904-\u0939", "एक हिन्दी घर"),
    ("\u0985-\u09b9", "এক বাংলা ঘর"),
    ("\u0a05-\u0a39", "ਇੱਕ ਪੰਜਾਬੀ ਘਰ"),
    ("\u0a85-\u0ab9", "એક ગુજરાતી ઘર"),
    ("\u0b05-\u0b39", "ଏକ ଓଡ଼ିଆ ଘର"),
    ("\u0b85-\u0bb9", "ஒன்ற தமிழ மரம"),
    ("\u0c05-\u0c39", "ఒకట తెలుగ ఇల"),
    ("\u0c85-\u0cb9", "ಒಂದ ಕನ್ನಡ ಮನ"),
    ("\u0d05-\u0d39", "ഒന്ന മലയാള വന"),
    ("\u0d85-\u0dc6", "එක සිංහල ගම"),
    ("\u0e01-\u0e30", "หนึ่ง ภาษาไทย บาน"),
    ("\u0e81-\u0eb0", "ໜຶ່ງ ພາສາລາວ ບານ"),
    ("\u1000-\u102a", "တစ် မြန်မာ လ"),
    ("\u10d0-\u10f0", "ერთი ქართული სახლი"),
    ("\u1200-\u135a", "ሀሁ ለሐ መሠ"),
    ("\u1780-\u17b3", "មួយ ភាសាខ្មែរ ផទះ"),
    ("\u3041-\u3096", "ひとつ です から"),
    ("\u30a1-\u30fa", "テスト ガス カメラ"),
    ("\u4e00-\u9fa5", "六 中文 七"),
    ("\uac00-\ud7a3", "하나 각 한국어"),
)
"""Letters of many scripts, and three words of each to try with a tokenizer. Marks are no letters: many tokenizers make
words of their own of them. A script that is missing here has borders only beside others."""
_MARKS = "\u0300-\u167f\u1780-\u17ff"
"""The scripts in which a word may end with a mark, with their letters, digits and punctuation: before a space and a
letter, a word ends with these, too."""
_LINE_ENDS = (r"\n", r"(?<!\s)\n")
"""After some white space, GPT-2's pattern makes a word of all of it but its last character."""
_PROBE = (
    "It's {0} {1}  {2}\n{0} {1}.\n\n{2} {0}, {1} 12345\n{2}1 {0}_8 {1}-{2}'s\n\t{0} '{1}\n \n{2} ({0} {1})\n\n\n\n{2}! "
    "\n{0}\r\n{1} {2}。{0}\uff0c{1}、{2} Nine-ten's {0} elf {1}\n12{2} {0}...\n{1} {2}{0}"
)


def borders(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Where the texts of this tokenizer may be cut: at the ends of what the pattern matches. None if nowhere. Its words
    must be tokenised one by one, and each border be one between words. So it is with all patterns in the manner of
    GPT-2."""
    normalizers, pre_tokenizers, _ = parts_of(tokenizer)
    if tokenizer.pre_tokenizer is None or any(step["type"] not in {"NFC", "NFD"} for step in normalizers):
        return None
    if any(step["type"] not in {"Split", "Digits", "ByteLevel"} for step in pre_tokenizers):
        return None
    if any(step.get("add_prefix_space") for step in pre_tokenizers):
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(_crosses_borders(token) for token in added):
        return None
    _, found = max((_borders_between_words(tokenizer, line_end) for line_end in _LINE_ENDS), key=lambda tried: tried[0])
    return found


def pieces(text: str, border: re.Pattern[str]) -> Iterator[str]:
    """Each is at least as long as `PIECE_CHARACTERS`, but for the last one; longer where there is no border."""
    start, at = 0, PIECE_CHARACTERS
    while at < len(text):
        if (found := border.search(text, at, at + _LOOK_AHEAD)) is None:
            at += _LOOK_AHEAD - 2  # a border may lie across the end of the search
            continue
        yield text[start : found.end()]
        start, at = found.end(), found.end() + PIECE_CHARACTERS
    yield text[start:]


def _borders_between_words(tokenizer: Tokenizer, line_end: str) -> tuple[int, re.Pattern[str] | None]:
    """The number of scripts that have borders, and these."""
    probes = {letters: _PROBE.format(*words.split()) for letters, words in _SCRIPTS}
    fit = [
        letters for letters, probe in probes.items() if _changes_no_word(tokenizer, _border(line_end, letters), probe)
    ]
    border = _border(line_end, "".join(fit)) if fit else None
    if border is None or not _changes_no_word(tokenizer, border, " ".join(probes.values())):
        return 0, None
    return len(fit), border


def _border(line_end: str, letters: str) -> re.Pattern[str]:
    """Ends between a letter or its mark and a space before another letter, before a mark of Chinese between letters,
    or between the end of a line and a letter."""
    letter = f"[{letters}]"
    between = rf"[{letters}{_MARKS}](?= {letter})|{letter}(?=[\uff0c\u3002\u3001]{letter})"
    return re.compile(f"{between}|{line_end}(?={letter})")


def _changes_no_word(tokenizer: Tokenizer, border: re.Pattern[str], text: str) -> bool:
    """Whether a text that is cut at each border has the words of the whole."""
    ends = [0, *(found.end() for found in border.finditer(text)), len(text)]
    cut = [word for start, end in pairwise(ends) for word in _words(tokenizer, text[start:end])]
    return cut == _words(tokenizer, text)


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


_ANY_BORDER = _border(_LINE_ENDS[0], "".join(letters for letters, _ in _SCRIPTS))


def _crosses_borders(token: Any) -> bool:
    """Whether a border may lie inside this added token, or inside the white space that it takes."""
    content = token.content
    if token.single_word or (token.lstrip and content[:1].isalpha()):
        return True
    spellings = {content, normalize("NFC", content), normalize("NFD", content)}
    return any(
        1 < found.end() <= len(spelling) + token.rstrip
        for spelling in spellings
        for found in _ANY_BORDER.finditer(f"a{spelling} a" if token.rstrip else f"a{spelling}a")
    )
