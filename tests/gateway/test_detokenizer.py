"""Tokens become text in linear time, whatever they are, and the pieces join to what decoding all at once gives."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from motet_gateway.tokens.detokenizer import (
    CONTEXT_TOKENS,
    HELD_TOKENS,
    DecodingDetokenizer,
    SpellingDetokenizer,
    detokenizer,
)
from motet_gateway.tokens.token_bytes import _BYTE_OF, TokenBytes
from testbed.fake_services import byte_tokenizer

BUNDLED = Path(__file__).parents[2] / "cli" / "motet_cli" / "bundled" / "model" / "tokenizer.json"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁▁", "▁the", "▁motet", "ing", "s", ".", "é", "東", "\ufffd"]


def pieces(*steps: Any) -> Tokenizer:
    """A tokenizer of bytes and words, whose decoder has these steps."""
    vocabulary = {word: at for at, word in enumerate(["<unk>", *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(list(steps))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def words(model: Any, decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def joined_bytes() -> Tokenizer:
    """Byte level, with tokens that end one character and begin the next one."""
    signs = {byte: sign for sign, byte in _BYTE_OF.items()}
    spelled = [b"\xe2\x82", b"\xac\xe2", b"\x82\xac", b"\x80\x80", b"\xf0", b"\xf0\x9f", b"\x99\x83", b" a", b"\xc3"]
    vocabulary = {"".join(signs[byte] for byte in token): at for at, token in enumerate(spelled)}
    return words(models.BPE(vocab=vocabulary, merges=[]), decoders.ByteLevel())


SPELLED: dict[str, Callable[[], Tokenizer]] = {
    "bundled": lambda: Tokenizer.from_file(str(BUNDLED)),
    "byte level": byte_tokenizer,
    "tokens across characters": joined_bytes,
    "pieces as in Llama 2": lambda: pieces(
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ),
    "pieces as in Gemma": lambda: pieces(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
    "marks as in T5": lambda: words(
        models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in WORDS)], unk_id=0), decoders.Metaspace()
    ),
    "marks without a first space": lambda: words(
        models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in WORDS)], unk_id=0),
        decoders.Metaspace(prepend_scheme="never"),
    ),
}
DECODED: dict[str, Callable[[], Tokenizer]] = {
    "words as in BERT": lambda: words(
        models.WordPiece({word: at for at, word in enumerate(["[UNK]", "the", "choir", "##s", "##ing", ".", "!"])}),
        decoders.WordPiece(),
    ),
    "no decoder": lambda: words(models.WordLevel({"a": 0, "b": 1, "\ufffd": 2}, unk_token="a"), None),
}
TOKENIZERS = {name: TokenBytes(make()) for name, make in (SPELLED | DECODED).items()}
"""By name; each with what it needs of `TokenBytes`."""


def tokens_of(token_bytes: TokenBytes) -> st.SearchStrategy[list[int]]:
    """Any tokens; often runs of one token, as a `logit_bias` makes them."""
    size = token_bytes.tokenizer.get_vocab_size()
    token = st.integers(0, size - 1)
    runs = st.lists(st.tuples(token, st.integers(1, 12)), max_size=12)
    return st.one_of(
        st.lists(token, max_size=60), runs.map(lambda said: [one for one, times in said for _ in range(times)])
    )


def cut(tokens: Sequence[int], borders: list[int]) -> list[Sequence[int]]:
    edges = sorted({0, len(tokens), *(border % (len(tokens) + 1) for border in borders)})
    return [tokens[start:end] for start, end in itertools.pairwise(edges)]


def streamed(token_bytes: TokenBytes, parts: Sequence[Sequence[int]], *, skip: bool, prompt: Sequence[int] = ()) -> str:
    text = detokenizer(token_bytes, prompt, skip_special_tokens=skip)
    return "".join(text.feed(part) for part in parts) + text.flush()


def all_at_once(token_bytes: TokenBytes, tokens: Sequence[int], *, skip: bool) -> str:
    """As `decode`, but a byte that belongs to no character spoils only itself. `decode` shows none of the characters
    around it, of which a stream has shown those before it."""
    text: str = token_bytes.tokenizer.decode(list(tokens), skip_special_tokens=skip)
    if not token_bytes.marks_each_byte:
        return text
    shown = [token for token in tokens if not (skip and token_bytes.special(token))]
    joined = b"".join(map(token_bytes.of, shown))
    strips = token_bytes.tokenizer.decode([_id(token_bytes, "▁the")]) == "the"
    lossy = joined.removeprefix(b" " if strips else b"").decode(errors="motet-each-byte")
    return text if _characters_are_whole(token_bytes, shown) else lossy


def _id(token_bytes: TokenBytes, word: str) -> int:
    token: int = token_bytes.tokenizer.token_to_id(word)
    return token


def _characters_are_whole(token_bytes: TokenBytes, tokens: Sequence[int]) -> bool:
    """Whether each run of bytes is either whole characters or not one: `decode` then marks each byte, too."""
    for of_bytes, run in itertools.groupby(tokens, key=lambda token: 1 <= token <= len(BYTES)):
        spelled = b"".join(map(token_bytes.of, run))
        marked = spelled.decode(errors="motet-each-byte")
        if of_bytes and "\ufffd" in marked and set(marked) != {"\ufffd"}:
            return False
    return True


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40)
@given(data=st.data(), borders=st.lists(st.integers(0, 60), max_size=20), skip=st.booleans())
def test_pieces_of_text_join_to_the_decoded_whole(
    kind: str, data: st.DataObject, borders: list[int], skip: bool
) -> None:
    token_bytes = TOKENIZERS[kind]
    tokens = data.draw(tokens_of(token_bytes))
    assert token_bytes.exact is (kind in SPELLED)
    whole = all_at_once(token_bytes, tokens, skip=skip)
    assert streamed(token_bytes, cut(tokens, borders), skip=skip) == whole
    assert streamed(token_bytes, [[token] for token in tokens], skip=skip) == whole


class _CountingTokenizer:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def id_to_token(self, token: int) -> str | None:
        said: str | None = self._tokenizer.id_to_token(token)
        return said

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        self.decoded += len(tokens)
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text


class _CountingBytes(dict[int, bytes]):
    def __init__(self, of: dict[int, bytes]) -> None:
        super().__init__()
        self._of = of
        self.read = 0

    def __getitem__(self, token: int) -> bytes:
        self.read += 1
        return self._of[token]


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=40)
@given(data=st.data(), skip=st.booleans())
def test_the_tokens_decoded_are_proportional_to_the_length(kind: str, data: st.DataObject, skip: bool) -> None:
    token_bytes = TokenBytes((SPELLED | DECODED)[kind]())
    token_bytes.tokenizer = counted = _CountingTokenizer(token_bytes.tokenizer)
    token_bytes.all, token_bytes.visible = read = _CountingBytes(token_bytes.all), _CountingBytes(token_bytes.visible)
    tokens = data.draw(tokens_of(TOKENIZERS[kind])) * 4
    streamed(token_bytes, [[token] for token in tokens], skip=skip)
    # Twice, if the text may end within a character: the context, and the context with what is held and the new token.
    most = 2 * (2 * CONTEXT_TOKENS + HELD_TOKENS + 1)
    assert counted.decoded + sum(each.read for each in read) <= most * (len(tokens) + 1)


@pytest.mark.parametrize("token", ["<0x80>", "<0xF0>", "</s>"])
def test_a_token_that_never_makes_a_character_holds_nothing_back(token: str) -> None:
    token_bytes = TOKENIZERS["pieces as in Llama 2"]
    text = detokenizer(token_bytes)
    shown = "".join(text.feed([_id(token_bytes, token)]) for _ in range(1000))
    assert len(shown) >= (0 if token == "</s>" else 1000 - HELD_TOKENS)
    assert text.feed([_id(token_bytes, "s")]).endswith("s")


@pytest.mark.parametrize("kind", SPELLED)
@settings(max_examples=40)
@given(data=st.data(), skip=st.booleans())
def test_an_answer_goes_on_where_its_prompt_ends(kind: str, data: st.DataObject, skip: bool) -> None:
    """Also within a character."""
    token_bytes = TOKENIZERS[kind]
    prompt, answer = data.draw(tokens_of(token_bytes)), data.draw(tokens_of(token_bytes))
    text = SpellingDetokenizer(token_bytes, [], skip_special_tokens=skip)
    before = text.feed(prompt)
    after = text.feed(answer) + text.flush()
    # Enough of the prompt that no character is cut, and that something visible is in it.
    known = SpellingDetokenizer(token_bytes, prompt, skip_special_tokens=skip)
    assert known.feed(answer) + known.flush() == after
    assert before + after == all_at_once(token_bytes, [*prompt, *answer], skip=skip)


def test_a_prompt_that_ends_within_a_character_is_not_shown_in_the_answer() -> None:
    token_bytes = TOKENIZERS["bundled"]
    tokens = token_bytes.tokenizer.encode("abc é").ids
    assert detokenizer(token_bytes, tokens[:-1]).feed(tokens[-1:]) == "é"


def test_other_decoders_show_a_character_with_its_last_token() -> None:
    """A decoder that is not known, but joins bytes."""
    token_bytes = TokenBytes(pieces(decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()))
    text = detokenizer(token_bytes)
    assert isinstance(text, DecodingDetokenizer)
    tokens = [_id(token_bytes, f"<0x{byte:02X}>") for byte in "🙃".encode()]
    assert [text.feed([token]) for token in tokens] == ["", "", "", "🙃"]
