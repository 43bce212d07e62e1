"""The bytes of an answer's tokens join to its text, with any tokenizer."""

import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from motet.api.v1 import runner_pb2
from motet.reasoning.formats import ExpectedReasoning
from motet.reasoning.splitter import ReasoningSplitter
from motet_gateway.answers.choice import MAX_WAITING, ChoiceText
from motet_gateway.answers.logprobs import ChatLogprobs, CompletionLogprobs
from motet_gateway.answers.parts import Scores, scores, texts
from motet_gateway.generation import EndReason
from motet_gateway.tokens.detokenizer import detokenizer
from motet_gateway.tokens.text_model import ModelTokenizer
from testbed.fake_services import CORPUS, byte_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentence_piece() -> Tokenizer:
    """A tokenizer like that of Llama 2: a mark stands for the space before a word, and bytes for unknown characters."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False, limit_alphabet=40)
    trained.train_from_iterator(CORPUS, trainer)
    words = [word for word, _ in sorted(trained.get_vocab().items(), key=lambda pair: pair[1]) if len(word) == 1]
    vocabulary = {word: at for at, word in enumerate(["<unk>", *BYTES, *dict.fromkeys(["▁", *words])])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


TEXTS = {
    "byte level": ModelTokenizer(byte_tokenizer(), None, 400, 512),
    "pieces": ModelTokenizer(sentence_piece(), None, 400, 512),
}


def answered(
    text: ModelTokenizer,
    prompt: str,
    answer: Sequence[int],
    *,
    silent: frozenset[int] = frozenset(),
    kind: type[ChatLogprobs | CompletionLogprobs] = ChatLogprobs,
    top: int = 0,
) -> ChoiceText:
    prompt_ids = text.encode([prompt], add_special_tokens=False)[0]
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    choice = ChoiceText(
        0,
        detokenizer(text.token_bytes, prompt_ids),
        None,
        hidden_ids=silent,
        min_tokens=0,
        logprobs=kind(text.token_bytes, top),
        on_placed=nothing,
        changed=nothing,
        stop_here=nothing,
        score=nothing,
    )
    for token in answer:
        choice.deliver([token], [runner_pb2.TokenLogprobs(logprob=-1, top_ids=[token], top_logprobs=[-1])])
    choice.end(EndReason.STOP)
    return choice


def shown_by(choice: ChoiceText) -> Any:
    assert choice.logprobs is not None
    return orjson.loads(b"".join(choice.logprobs.as_json(choice.logprobs.take())))


@pytest.mark.parametrize("kind", TEXTS)
@given(prompt=st.sampled_from(["Hi", "Hi ", "<s>", "a<s>"]), generated=st.text(min_size=1, max_size=20))
def test_bytes_of_tokens_join_to_the_text(kind: str, prompt: str, generated: str) -> None:
    text = TEXTS[kind]
    choice = answered(text, prompt, text.encode([generated], add_special_tokens=False)[0], top=1)
    shown = shown_by(choice)["content"]
    joined = bytes(byte for token in shown for byte in token["bytes"])
    assert joined.decode("utf-8", "replace") == "".join(texts(choice.take()))
    assert all("\ufffd" not in token["token"] or "\ufffd" in generated for token in shown)


def test_a_part_of_a_character_is_shown_as_bytes() -> None:
    text = TEXTS["byte level"]
    choice = answered(text, "Hi", text.encode(["🙃"], add_special_tokens=False)[0])
    shown = shown_by(choice)["content"]
    assert len(shown) > 1
    assert shown[0]["token"].startswith("bytes:\\xf0")


def test_a_leading_space_of_a_word_is_kept() -> None:
    text = TEXTS["pieces"]
    choice = answered(text, "Hi", text.encode([" the choir"], add_special_tokens=False)[0])
    shown = shown_by(choice)["content"]
    assert "".join(token["token"] for token in shown) == " the choir" == "".join(texts(choice.take()))


def test_the_token_that_ends_an_answer_adds_nothing_to_its_text() -> None:
    text = TEXTS["byte level"]
    choice = answered(text, "Hi", [*text.encode(["ok"], add_special_tokens=False)[0], 0], silent=frozenset({0}))
    shown = shown_by(choice)["content"]
    assert shown[-1]["token"] == "<|end|>"
    assert shown[-1]["bytes"] == []


def test_offsets_count_characters_of_the_text() -> None:
    text = TEXTS["byte level"]
    tokens = text.encode(["a🙃b"], add_special_tokens=False)[0]
    choice = answered(text, "Hi", tokens, kind=CompletionLogprobs)
    shown = shown_by(choice)
    assert shown["text_offset"][0] == 0
    assert shown["text_offset"][1:-1] == [1] * (len(tokens) - 2)
    assert shown["text_offset"][-1] == 2


def test_offsets_count_each_byte_that_the_detokenizer_marks() -> None:
    text = TEXTS["pieces"]
    tokens = [text.tokenizer.token_to_id(token) for token in ("<0x61>", "<0xE2>", "<0x82>", "<0x62>", "<0x63>")]
    choice = answered(text, "Hi", tokens, kind=CompletionLogprobs)
    assert shown_by(choice)["text_offset"][-1] == 4
    assert "".join(texts(choice.take())) == "a\ufffd\ufffdbc"


def test_all_that_is_held_is_released_if_it_is_taken_in_parts() -> None:
    text, held = TEXTS["byte level"], list[int]()
    writer, joined = ChatLogprobs(text.token_bytes, 1, hold=held.append), dict[str, bytearray]()
    for token in range(20):
        writer.add(token, runner_pb2.TokenLogprobs(logprob=-1, top_ids=[token], top_logprobs=[-1]), b"a")
        if token % 5 == 4:
            writer.join(joined, writer.take())
    assert sum(held) == len(joined["content"])
    assert len(orjson.loads(b"[%b]" % joined["content"])) == 20
    writer.release(joined)
    assert sum(held) == 0


def test_a_token_with_a_part_of_a_texts_first_character_is_the_texts() -> None:
    """It ends the reasoning and writes no whole character of the text; the next one does."""
    words = ["so", "</think>\u00c3", "\u00a9", "."]  # as byte-level vocabularies spell the two bytes of an e acute
    tokenizer = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    text, nothing = ModelTokenizer(tokenizer, None, 400, 512), lambda *_: None
    choice = ChoiceText(
        0,
        detokenizer(text.token_bytes),
        None,
        hidden_ids=frozenset(),
        min_tokens=0,
        logprobs=ChatLogprobs(text.token_bytes, 0),
        splitter=ReasoningSplitter(ExpectedReasoning("<think>", "</think>", begun=True)),
        on_placed=nothing,
        changed=nothing,
        stop_here=nothing,
        score=nothing,
    )
    for token in range(len(words)):
        choice.deliver([token], [runner_pb2.TokenLogprobs(logprob=-1)])
    choice.end(EndReason.STOP)
    parts = choice.take()
    assert "".join(texts(parts)) == "\u00e9."
    of_text = [part.columns["content"] for part in parts if isinstance(part, Scores) and part.of_text]
    of_others = [part.columns["content"] for part in parts if isinstance(part, Scores) and not part.of_text]
    assert [len(orjson.loads(b"[%b]" % b",".join(some))) for some in (of_others, of_text)] == [1, 3]


def test_scores_that_wait_for_what_their_tokens_are_take_little_more_than_is_counted() -> None:
    """Of an answer that is nothing but white space behind a tag, as its client may order it."""
    text, held, nothing = TEXTS["byte level"], Counter[str](), lambda *_: None
    (space,) = text.encode(["\n"], add_special_tokens=False)[0]
    choice = ChoiceText(
        0,
        detokenizer(text.token_bytes),
        None,
        hidden_ids=frozenset(),
        min_tokens=0,
        logprobs=ChatLogprobs(text.token_bytes, 0, hold=lambda size: held.update(bytes=size)),
        splitter=ReasoningSplitter(ExpectedReasoning("<think>", "</think>", begun=True)),
        on_placed=nothing,
        changed=nothing,
        stop_here=nothing,
        score=nothing,
    )
    one = [runner_pb2.TokenLogprobs(logprob=-1)]
    tracemalloc.start()
    try:
        for _ in range(16_000):
            choice.deliver([space], one)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < held["bytes"] + 600 * MAX_WAITING
    choice.end(EndReason.STOP)
    (scored,) = scores(choice.take())
    assert len(orjson.loads(b"[%b]" % scored["content"])) == 16_000
