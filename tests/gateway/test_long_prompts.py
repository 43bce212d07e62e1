"""Long texts: refused by their bytes before they are tokenised, tokenised in pieces, and in little memory."""

import asyncio
import itertools
import json
import subprocess
import sys
import textwrap
import threading
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from motet.errors import RequestTooLarge
from motet_gateway.tokens import text_model, text_pieces
from motet_gateway.tokens.encoder import LANES, Encoder
from motet_gateway.tokens.text_bounds import most_bytes_per_token
from motet_gateway.tokens.text_model import Keep, ModelTokenizer, TooManyTokens
from motet_gateway.tokens.text_pieces import borders, pieces
from testbed.fake_services import byte_tokenizer
from tests.gateway.conftest import Served
from tests.gateway.test_detokenizer import BUNDLED
from tests.gateway.test_errors import error_of

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)


def changed(change: Callable[[Any], None], tokenizer: Tokenizer | None = None) -> Tokenizer:
    made = Tokenizer.from_str((tokenizer or byte_tokenizer()).to_str())
    change(made)
    return made


def normalized(*steps: Any) -> Tokenizer:
    return changed(lambda made: setattr(made, "normalizer", normalizers.Sequence(list(steps))))


def split(*patterns: str) -> Tokenizer:
    """As `byte_tokenizer`, with words like these, some of them of white space."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    spaces = ["a" + "".join(some) for size in (2, 3, 4) for some in itertools.product(" \n\r\t", repeat=size)]
    trained.train_from_iterator([*spaces * 3, "The quick brown fox. Это строка текста. 東京の船。"], trainer)
    return trained


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
    "as Llama 3": lambda: split(LLAMA_3),
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
    "byte level": byte_tokenizer,
    "as GPT-2": lambda: split(GPT_2),
    "as Llama 3": lambda: split(LLAMA_3),
    "as Qwen 2": lambda: split(QWEN_2),
    "as DeepSeek": lambda: split(*DEEPSEEK),
    "canonical form": BOUNDED["canonical form"],
    "takes spaces": BOUNDED["takes spaces"],
}
UNCUT = {
    "pieces": sentence_piece,
    "a space before each text": lambda: changed(
        lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True))
    ),
    "a token of two words": lambda: with_token(AddedToken("two words")),
    "a token that ends with a space": lambda: with_token(AddedToken("User ", normalized=False)),
    "a token that begins with a line's end": lambda: with_token(AddedToken("\nUser", normalized=False)),
    "a token of two decomposed words": lambda: with_token(AddedToken("cafe\u0301 noir"), normalized(normalizers.NFC())),
    "a token with a mark that takes spaces": lambda: with_token(AddedToken("e\u0301", rstrip=True)),
    "a word that takes spaces": lambda: with_token(AddedToken("end", rstrip=True)),
    "words of two words": lambda: changed(
        lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated"))
    ),
    "unknown words": UNBOUNDED["unknown words"],
}


CUT_MODELS = {name: ModelTokenizer(make(), None, 400, 512) for name, make in CUT.items()}
SCRIPTS = {
    "Latin": "the quick fox naïve",
    "Cyrillic": "Это строка текста ещё",
    "Greek": "και ένα λόγος",
    "Hebrew": "שלום בְּרֵאשִׁית אחד",
    "Arabic": "واحد كِتَاب این",
    "Hindi": "एक हिन्दी घर",
    "Tamil": "தமிழ் மரம் ஒன்று",
    "Thai": "ภาษาไทย บ้าน หนึ่ง",
    "Georgian": "ერთი სახლი",
    "Armenian": "Բարեւ եւ մեկ",
    "Amharic": "ሀሁ ለሐ መሠ",
    "Kana": "ひとつ です テスト",
    "Chinese": "六 中文 七",
    "Korean": "하나 각 한국어",
}
BETWEEN = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\n\n\n\n",
    " \n",
    " \n\n ",
    "\r\n",
    "\t",
    "\u3000",
    "1",
    "2345",
    ".",
    ",",
    "。",
    "，",
]
BETWEEN += ["'s", " '", "’", "_", "-", "(", "/", "...", "é", "e\u0301", "\u0e49", "½", "<a>"]
written = st.lists(
    st.one_of(
        st.sampled_from(BETWEEN),
        st.sampled_from([word for words in SCRIPTS.values() for word in words.split()]),
        st.text("a \n\r\t", max_size=6),
    ),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("kind", CUT)
@given(text=st.one_of(texts, written))
@example(text="x1.\n\n\n\nfoo bar 1.")
@settings(max_examples=15)
def test_a_text_in_pieces_has_the_same_tokens(kind: str, text: str) -> None:
    model = CUT_MODELS[kind]
    border = borders(model.tokenizer)
    assert border is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_pieces, "PIECE_CHARACTERS", 1)
        patch.setattr(text_pieces, "_LOOK_AHEAD", 4)
        assert "".join(pieces(text, border)) == text
        patch.setattr(text_model, "PIECE_CHARACTERS", 1)
        (in_pieces,) = model.encode([text], add_special_tokens=True)
    assert in_pieces.tolist() == model.tokenizer.encode(text, add_special_tokens=True).ids


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", CUT)
def test_a_long_text_of_any_script_is_cut(kind: str, script: str) -> None:
    border = borders(CUT_MODELS[kind].tokenizer)
    assert border is not None
    longest = text_model.MAX_UNCUT_BYTES // 4
    for text in (f"{SCRIPTS[script]}. ", f"{SCRIPTS[script].split()[0]}.\n"):
        assert max(map(len, pieces(text * (2 * longest // len(text)), border))) < longest


def test_a_script_whose_words_may_cross_a_border_alone_has_none() -> None:
    tokenizer = split(r"[\u0400-\u052f]+ [\u0400-\u052f]+", GPT_2)
    border = borders(tokenizer)
    assert border is not None
    assert not border.search("Это строка")
    assert border.search("the quick")


@pytest.mark.parametrize("kind", UNCUT)
def test_a_tokenizer_whose_words_may_cross_a_border_gets_whole_texts(kind: str) -> None:
    assert borders(UNCUT[kind]()) is None


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
    encode = lambda sign, size: asyncio.create_task(encoder.encode([sign * size], model, special=False, tenant="t"))  # type: ignore[arg-type]  # noqa: E731
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


async def test_tenants_have_their_turns() -> None:
    """Mutation: all texts begin in the order in which they came."""
    encoder, model = Encoder(threaded_bytes=10), _SlowModel()
    size = LANES[-2][0] + 1
    try:
        texts = [asyncio.ensure_future(_encoded(encoder, model, sign, size)) for sign in ("a1", "a2", "a3", "b4")]
        for _ in texts:
            model.now.release()
        await asyncio.gather(*texts)
        assert model.begun == ["1", "2", "4", "3"]
    finally:
        encoder.close()


async def _encoded(encoder: Encoder, model: Any, sign: str, size: int) -> None:
    await encoder.encode([sign[1] * size], model, special=False, tenant=sign[0])


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
    await asyncio.gather(*(encoder.encode([text], model, special=False, tenant="") for _ in range(4)))
    print(peak() - before)
    encoder.close()

asyncio.run(main())
"""


def test_many_long_prompts_take_little_memory() -> None:
    """The library takes 500 MiB for one of them at once."""
    script = f"PATH = {str(BUNDLED)!r}\n" + textwrap.dedent(MEMORY)
    grown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 160
