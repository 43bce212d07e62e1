"""The texts by whose ids two tokenizers are compared, and these ids."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROSE = """\
Hello, world! The quick brown fox jumps over the lazy dog; it's 5 o'clock, and they'll say: "We'd've gone."
HELLO WORLD, I'M HERE. hello world hElLo wOrLd. e-mail, re-use, and/or, naïve café, Mr. O'Neill's
In 2026 it cost $1,234.56 (about 3.1415926535e-10%), i.e. 0xFF + 1_000_000 = 007. +49 30 1234567 12:34:56 ½ x² H₂O №5
Grüße aus Österreich: Straße, Übermut, ÄÖÜ, Fußgängerübergänge. L'été où ça s'est passé, cœur, Noël, français.
El niño preguntó: ¿qué pasó mañana? ¡Nada! São Paulo, coração, não. Zażółć gęślą jaźń. Příliš žluťoučký kůň.
İstanbul'da ışık ğ ş. Țară și oraș. Þórður á Íslandi. Smørrebrød på Åland. Đặng Thị Hương sống ở Việt Nam.
Καλημέρα κόσμε, Σίσυφος. Привет, мир! Ёлка и объявление. Київ, їжак, ґанок. Здраво, љубав, џеп.
مرحبا بالعالم، كيف حالك؟ مُحَمَّد ١٢٣٤ فارسی می‌خواهم. שלום עולם, בְּרֵאשִׁית. اردو زبان
नमस्ते दुनिया, क्षत्रिय १२३। বাংলা ভাষা। ਪੰਜਾਬੀ ગુજરાતી தமிழ் తెలుగు ಕನ್ನಡ മലയാളം සිංහල
สวัสดีชาวโลก ภาษาไทย ๑๒๓ ລາວ မြန်မာ ខ្មែរ བོད་ཡིག გამარჯობა Բարեւ አማርኛ
你好,世界!我们今天学习机器学习。繁體中文:臺灣。
こんにちは世界、カタカナとひらがな。「東京」は１２３です。안녕하세요 세계, 한국어.
👋🌍 😀😂 👩‍👩‍👧‍👦 👍🏽 🇩🇪🇯🇵 ❤️ ☕ ✓ → ⇒ ∀x∈ℝ: ∑αᵢ ≤ ∞ ≠ √2 ± ½ × ÷ © ® ™ € £ ¥ § † • … – — ‘a’ “b” «c» „d“
# Title ## Part **bold** _it_ `code` [link](https://example.org/a/b?c=d&e=f%20g#h) user@example.org ~/.config C:\\Temp
def f(x: int) -> str: return f"{x!r:>8}" if x != 0 and x ** 2 >= 1 else None  # camelCase snake_case SCREAMING_CASE
for (int i = 0; i < n; ++i) { a[i] += b->c * *p & 0x1F; } // λ => {...} && || :: <T>() ?. !== @a $b %c ^d ~e \\n \\u0041
SELECT * FROM t WHERE a='b' AND c<>5; <div class="x">&nbsp;</div><br/> {"a": [1, 2.5, null, true], "b": {"c": ""}}
User: hi Assistant: [INST] <<SYS>> be kind <</SYS>> [/INST] ### Instruction: ### Response:
<|user|>hi<|end|> <think></think>"""
"""One text in each line"""

SPACED = (
    "two  blanks   three    four     and\ttabs\t\tand both \t x",
    "ends with a blank ",
    "ends with blanks    ",
    "ends with line breaks\n\n\n",
    "lines\nand\n\nempty\n\n\nones\r\nand\rold\n ones\n  with\n    blanks \n \n\n\tafter",
    "\nbegins with a line break",
    "\tbegins with a tab",
    "def f(x):\n    if x:\n\t\treturn [\n            x,\n        ]\n\n\nclass A:\n    pass\n",
    "- a\n- b\n  - c\n\n1. d\n2. e\n\n```python\nprint('f')\n```\n| g | h |\n|---|---|\n",
    "no\u00a0break\u2009thin\u3000wide\u200bzero\u2028line\u2060word\ufeffmark\u00adsoft",
)
FORMS = (
    "composed \u00e9\u00f1\u1ec7\uac00 and not e\u0301n\u0303e\u0323\u0302\u1100\u1161 \u0958 \u212b \u2126",
    "\ufb01nal \ufb00 \uff28\uff45\uff4c\uff4c\uff4f \uff76\uff9e \u2460 \u2075 \u00aa \u33a1 \u2026 \u01c6",
    "bytes \x00\x01\x02\x07\x08\x0b\x0c\x0e\x1b\x1f\x7f\x80\x85\x9f\u00ff\ufffd",
    "rare \ue000\uf8ff\U0001d54f\U00010348\U0002070e\U000e0041\U0010fffd \u2800\u3164\u2592\u2588",
    "0 1 12 123 1234 12345 123456 1234567 12345678 123456789 1.2.3 1e5 1,2 ٣٤ ४५",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ================================ ................ ---------------- !!!!????",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft antidisestablishmentarianism",
)
BEGIN_WITH_BLANKS = (" hello", "  hello", " \nhello", "   ", "\u2581hello")
"""A library that saves a tokenizer may write how such a text begins in another way than it has read it"""
BESIDE_TOKENS = ("hello{}world", "hello {} world", "{}hello", "{} hello", "{}\nhello{}")
BLANKS = " \u2581"
MAX_FROM_VOCABULARY = 4096
MAX_ADDED = 4096
MAX_TOKENS_WITH_TEXT = 64

Ids = Sequence[int] | None
"""None: it cannot tokenise the text."""


def ordinary_texts(tokenizer: "Tokenizer", added: Sequence[str]) -> Iterator[str]:
    """The fixed ones, some that hold the words of this tokenizer, and the tokens that have been added to its words. No
    text begins with a blank."""
    yield from PROSE.split("\n")
    yield from SPACED
    yield from FORMS
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    for number in range(0, size, 1 + size // MAX_FROM_VOCABULARY):
        if text := tokenizer.decode([number]):
            yield f"a{text}" if text[0] in BLANKS else text
    yield from islice((token for token in added if token[:1] not in BLANKS), MAX_ADDED)


def rare_texts(added: Sequence[str]) -> Iterator[str]:
    """A text that begins with a blank, or is beside an added token"""
    yield from BEGIN_WITH_BLANKS
    for token in islice(added, MAX_TOKENS_WITH_TEXT):
        yield from (text.replace("{}", token) for text in BESIDE_TOKENS)


def ids_of(tokenizer: "Tokenizer", text: str, *, special_tokens: bool = False) -> Ids:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=special_tokens).ids)
    except MemoryError:
        raise
    except BaseException:  # the library raises bare Exceptions, and panics with its own
        return None
