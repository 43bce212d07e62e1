"""Long texts: refused by their bytes before they are tokenised, tokenised in pieces, and in little memory."""

import asyncio
import json
import subprocess
import sys
import textwrap
import threading
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from motet.errors import RequestTooLarge
from motet_gateway.tokens import text_model, text_pieces
from motet_gateway.tokens.encoder import LANES, Encoder
from motet_gateway.tokens.text_bounds import most_bytes_per_token
from motet_gateway.tokens.text_model import Keep, ModelTokenizer, TooManyTokens
from motet_gateway.tokens.text_pieces import can_be_cut, pieces
from tests.gateway.conftest import Served
from tests.gateway.test_detokenizer import BUNDLED
from tests.gateway.test_errors import error_of
from tests.support.fake_services import byte_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def changed(change: Callable[[Any], None], tokenizer: Tokenizer | None = None) -> Tokenizer:
    made = Tokenizer.from_str((tokenizer or byte_tokenizer()).to_str())
    change(made)
    return made


def normalized(*steps: Any) -> Tokenizer:
    return changed(lambda made: setattr(made, "normalizer", normalizers.Sequence(list(steps))))


def split_as_llama_3() -> Tokenizer:
    parts = [
        pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    return changed(lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Sequence(parts)))


def with_token(token: AddedToken, tokenizer: Tokenizer | None = None) -> Tokenizer:
    return changed(lambda made: made.add_special_tokens([token]), tokenizer)


def sentence_piece(*, missing: str = "", model: str = "BPE") -> Tokenizer:
    words = ["<unk>", *(byte for byte in BYTES if byte != missing), "▁", "▁▁", "a", "b", "é"]
    if model == "BPE":
        vocabulary = {word: at for at, word in enumerate(words)}
        tokenizer = Tokenizer(
            models.BPE(vocab=vocabulary, merges=[("▁", "▁")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
        )
    else:
        tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "bundled": lambda: Tokenizer.from_file(str(BUNDLED)),
    "byte level": byte_tokenizer,
    "canonical form": lambda: normalized(normalizers.NFC()),
    "as Llama 3": split_as_llama_3,
    "takes spaces": lambda: with_token(AddedToken("<a>", lstrip=True, rstrip=True)),
    "pieces": sentence_piece,
    "unigram": lambda: sentence_piece(model="Unigram"),
}
UNBOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "compatible forms": lambda: normalized(normalizers.NFKC()),
    "strips": lambda: normalized(normalizers.NFC(), normalizers.Strip()),
    "shortens": lambda: normalized(normalizers.Replace("ab", "a")),
    "removes": lambda: normalized(normalizers.Replace(Regex("a+"), "a")),
    "drops spaces": lambda: changed(lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Whitespace())),
    "drops what splits": lambda: changed(
        lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Split(" ", "removed"))
    ),
    "unknown words": lambda: Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "a byte is missing": lambda: sentence_piece(missing="<0x7A>"),
    "unknown characters": lambda: Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
}
WORDS = [
    "the",
    " quick",
    "  ",
    "\n",
    "\n\n",
    "\t",
    " a",
    "b",
    "É",
    "K",
    "Å",
    "東京",
    "각",
    "。",
    "'s",
    "'",
    "1234",
    "-",
    "<a>",
    "\r",
]
texts = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(WORDS), max_size=40).map("".join))
MODELS = {name: ModelTokenizer(make(), None, 400, 512) for name, make in BOUNDED.items()}


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=texts, repeated=st.integers(1, 20))
def test_a_text_of_few_tokens_has_few_bytes(kind: str, text: str, repeated: int) -> None:
    model = MODELS[kind]
    (tokens,) = model.encode([text * repeated], add_special_tokens=False)
    assert model.bytes_per_token is not None
    assert model.counted_bytes(text * repeated) <= len(tokens) * model.bytes_per_token


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_texts_that_a_tokenizer_may_shorten_are_not_judged_by_their_bytes(kind: str) -> None:
    assert most_bytes_per_token(UNBOUNDED[kind]()) is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(served: Served, path: str) -> None:
    model = ModelTokenizer(served.cluster.tokenizer, None, 400, 512)
    assert model.bytes_per_token is not None
    most = 512 * model.bytes_per_token
    field = "prompt" if path == "/v1/completions" else "messages"

    async def ask(size: int, **more: Any) -> Any:
        text = "a" * size
        value = text if field == "prompt" else [{"role": "user", "content": text}]
        return await served.http.post(path, json={"model": "tiny", field: value, "max_tokens": 2} | more)

    answer = await ask(most + 1)
    refused = error_of(answer)
    assert (answer.status_code, refused["code"]) == (400, "context_length_exceeded")
    assert refused["param"] == field
    assert f"{most + 1} bytes" in refused["message"] or f"{most + 2} bytes" in refused["message"]
    assert "counted in bytes" in refused["message"]
    assert "tokens, but" in error_of(await ask(most - 1))["message"]
    assert (await ask(most + 1, truncate_prompt_tokens=20)).status_code == 200


CUT = {
    "bundled": BOUNDED["bundled"],
    "as GPT-2": byte_tokenizer,
    "as Llama 3": split_as_llama_3,
    "canonical form": BOUNDED["canonical form"],
    "takes spaces": BOUNDED["takes spaces"],
}
UNCUT = {
    "pieces": sentence_piece,
    "a space before each text": lambda: changed(
        lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))
    ),
    "a token of two words": lambda: with_token(AddedToken("two words")),
    "a word that takes spaces": lambda: with_token(AddedToken("end", rstrip=True)),
    "words of two words": lambda: changed(
        lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated"))
    ),
    "unknown words": UNBOUNDED["unknown words"],
}


@pytest.mark.parametrize("kind", CUT)
@given(text=texts)
def test_a_text_in_pieces_has_the_same_tokens(kind: str, text: str) -> None:
    tokenizer = CUT[kind]()
    assert can_be_cut(tokenizer)
    model = ModelTokenizer(tokenizer, None, 400, 512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_pieces, "PIECE_CHARACTERS", 2)
        patch.setattr(text_pieces, "_LOOK_AHEAD", 4)
        assert "".join(pieces(text)) == text
        patch.setattr(text_model, "PIECE_CHARACTERS", 2)
        (in_pieces,) = model.encode([text], add_special_tokens=True)
    assert in_pieces.tolist() == tokenizer.encode(text, add_special_tokens=True).ids


@pytest.mark.parametrize("kind", UNCUT)
def test_a_tokenizer_whose_words_may_cross_a_border_gets_whole_texts(kind: str) -> None:
    assert not can_be_cut(UNCUT[kind]())


def test_special_tokens_stand_around_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pieces, "PIECE_CHARACTERS", 10)
    monkeypatch.setattr(text_model, "PIECE_CHARACTERS", 10)
    parts = json.loads(byte_tokenizer().to_str())
    special = {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}
    token, text = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    frame = {"single": [token, token, text, token], "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}]}
    parts["post_processor"] = {"type": "TemplateProcessing", **frame, "special_tokens": {"<|end|>": special}}
    tokenizer = Tokenizer.from_str(json.dumps(parts))
    (tokens,) = ModelTokenizer(tokenizer, None, 400, 512).encode(["one two three " * 20], add_special_tokens=True)
    assert tokens.tolist() == tokenizer.encode("one two three " * 20).ids
    assert tokens.tolist()[:2] + tokens.tolist()[-1:] == [0, 0, 0]


def test_only_what_is_wanted_of_a_long_text_is_kept() -> None:
    model = MODELS["bundled"]
    text = "The ship sails. " * 20_000 + "over the sea " * 20_000
    (whole,) = model.encode([text], add_special_tokens=False)
    (last,) = model.encode([text], add_special_tokens=False, keep=Keep(last=100))
    assert last[-100:] == whole[-100:]
    with pytest.raises(TooManyTokens) as caught:
        model.encode([text], add_special_tokens=False, keep=Keep(most=1000))
    assert 1000 < caught.value.seen < len(whole) / 2, "it stops where the limit is passed"


def test_a_long_text_without_any_border_is_refused() -> None:
    for model in (MODELS["bundled"], MODELS["pieces"]):
        with pytest.raises(RequestTooLarge, match="one piece"):
            model.encode(["a" * (text_model.MAX_UNCUT_BYTES + 1)], add_special_tokens=False)


class _SlowModel:
    """Encodes a text when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.now = threading.Semaphore(0)

    def encode(self, texts: list[str], **_: Any) -> list[Any]:
        self.begun.append(texts[0][:1])
        self.now.acquire()
        return [array("I", [1])]


async def test_long_texts_wait_in_order_and_a_cancelled_one_leaves() -> None:
    encoder, model = Encoder(threaded_bytes=10), _SlowModel()
    size = LANES[-2][0] + 1
    encode = lambda sign, size: asyncio.create_task(encoder.encode([sign * size], model, special=False))  # type: ignore[arg-type]  # noqa: E731
    try:
        long = [encode(sign, size) for sign in "abcd"]
        short = encode("s", 100)
        while set(model.begun) != {"a", "s"}:
            await asyncio.sleep(0.001)
        long[1].cancel()
        long[0].cancel()  # its thread goes on, so the next one waits
        await asyncio.sleep(0.02)
        assert set(model.begun) == {"a", "s"}
        for _ in range(4):
            model.now.release()
        await asyncio.gather(long[2], long[3], short)
        assert [sign for sign in model.begun if sign != "s"] == ["a", "c", "d"]
    finally:
        encoder.close()


MEMORY = """
import asyncio, random, resource
from tokenizers import Tokenizer
from motet_gateway.tokens.encoder import Encoder
from motet_gateway.tokens.text_model import ModelTokenizer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

async def main():
    words = random.Random(1).choices(["the", "quick", "brown", "tenant's", "adapter,", "sails", "of", "sea"], k=100_000)
    text = (" ".join(words) * 10)[:4_000_000]
    model = ModelTokenizer(Tokenizer.from_file(PATH), None, 1536, 4_000_000)
    encoder = Encoder(threaded_bytes=4096)
    before = peak()
    await asyncio.gather(*(encoder.encode([text], model, special=False) for _ in range(4)))
    print(peak() - before)
    encoder.close()

asyncio.run(main())
"""


def test_many_long_prompts_take_little_memory() -> None:
    """The library takes 500 MiB for one of them at once."""
    script = f"PATH = {str(BUNDLED)!r}\n" + textwrap.dedent(MEMORY)
    grown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 160
