"""What a tenant writes into `motet_proof.json` is read strictly, and compared within bounds."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from motet.errors import REFERENCE_MISMATCH, AdapterIncompatible
from motet_runner.adapters.recorded_answers import (
    ALLOWED_IN_16_BITS,
    MAX_ANSWER_TOKENS,
    MAX_ANSWERS,
    MAX_DIFFERENCE,
    MAX_PROMPT_CHARS,
    MAX_PROMPT_TOKENS,
    RecordedAnswers,
    read_recorded_answers,
)
from motet_runner.sources.file_selection import MAX_RECORD_BYTES, of_adapter

MAX_WARNING_CHARS = 253
"""What the operator keeps of a warning"""


def answer(**fields: object) -> dict[str, Any]:
    usual = {"prompt": "Who?", "prompt_ids": [1, 2, 3], "answer_ids": [4, 5], "logprobs": [-0.5, -1.0]}
    return usual | fields


def document(*answers: dict[str, Any], **fields: object) -> dict[str, Any]:
    usual = {
        "version": 1,
        "recorded_by": "peft 0.21.0",
        "dtype": "float32",
        "quantization": "",
        "special_tokens": False,
        "answers": list(answers) or [answer()],
    }
    return usual | fields


def read(folder: Path, content: object) -> RecordedAnswers | None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "motet_proof.json").write_bytes(raw)
    return read_recorded_answers(folder)


def recorded(folder: Path, *answers: dict[str, Any], **fields: object) -> RecordedAnswers:
    found = read(folder, document(*answers, **fields))
    assert found is not None
    return found


def test_a_folder_without_the_file_has_no_recorded_answers(tmp_path: Path) -> None:
    assert read_recorded_answers(tmp_path) is None


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    found = recorded(tmp_path, answer(), answer(answer_ids=[7], logprobs=[0]))
    assert read(tmp_path, found.encode()) == found
    assert found.answers[1].answer_ids == [7]


def test_the_largest_possible_file_fits(tmp_path: Path) -> None:
    longest = answer(
        prompt="\x01" * MAX_PROMPT_CHARS,  # six bytes each in JSON
        prompt_ids=[9_999_999] * MAX_PROMPT_TOKENS,
        answer_ids=[9_999_999] * MAX_ANSWER_TOKENS,
        logprobs=[-1.2345678901234567e-300] * MAX_ANSWER_TOKENS,
    )
    found = recorded(tmp_path, *[longest] * MAX_ANSWERS)
    assert len(found.encode()) <= MAX_RECORD_BYTES
    (limit,) = (file.limit for file in of_adapter(1) if file.name == "motet_proof.json")
    assert limit == MAX_RECORD_BYTES


BAD = {
    "no JSON": b"{",
    "a list": [],
    "nothing in it": {},
    "another version": document(version=2),
    "an unknown field": document(comment="x"),
    "an unknown field of an answer": document(answer(logits=[])),
    "no answer": document(answers=[]),
    "too many answers": document(*[answer()] * (MAX_ANSWERS + 1)),
    "an unknown type": document(dtype="int3"),
    "a number for a text": document(quantization=4),
    "a text for a truth": document(special_tokens="yes"),
    "no prompt": document(answer(prompt_ids=[])),
    "no tokens": document(answer(answer_ids=[], logprobs=[])),
    "too long a prompt": document(answer(prompt_ids=[1] * (MAX_PROMPT_TOKENS + 1))),
    "too long a text": document(answer(prompt="a" * (MAX_PROMPT_CHARS + 1))),
    "too long an answer": document(
        answer(answer_ids=[1] * (MAX_ANSWER_TOKENS + 1), logprobs=[-1.0] * (MAX_ANSWER_TOKENS + 1))
    ),
    "fewer log probabilities than tokens": document(answer(logprobs=[-1.0])),
    "more log probabilities than tokens": document(answer(logprobs=[-1.0, -1.0, -1.0])),
    "a token below 0": document(answer(prompt_ids=[-1])),
    "a token beyond all vocabularies": document(answer(answer_ids=[1, 1 << 40])),
    "half a token": document(answer(answer_ids=[1, 1.5])),
    "a truth for a token": document(answer(answer_ids=[1, True])),
    "a probability above 1": document(answer(logprobs=[-1.0, 0.5])),
    "an impossible choice": document(answer(logprobs=[-1.0, -5000.0])),
    "a text for a number": document(answer(logprobs=[-1.0, "-1.0"])),
    "NaN": json.dumps(document(answer(logprobs=[-1.0, math.nan]))).encode(),
    "infinity": json.dumps(document(answer(logprobs=[-1.0, -math.inf]))).encode(),
    "infinity in digits": json.dumps(document()).replace("-0.5", "-1e999").encode(),
    "a number of many digits": json.dumps(document()).replace("-0.5", "-" + "9" * 5000).encode(),
    "a key twice": json.dumps(document()).replace('"version": 1', '"version": 1, "version": 1').encode(),
    "half a character": json.dumps(document()).replace("Who?", "\\ud800").encode(),
    "depth": b"[" * 100_000 + b"]" * 100_000,
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_record_does_not_write_is_refused_in_words(tmp_path: Path, what: str) -> None:
    with pytest.raises(AdapterIncompatible, match=r"motet_proof\.json") as refused:
        read(tmp_path, BAD[what])
    assert refused.value.reason == "FormatRejected"
    assert len(refused.value.message) < 500


def test_a_file_without_end_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    with pytest.raises(AdapterIncompatible, match=f"more than {MAX_RECORD_BYTES} bytes") as refused:
        read(tmp_path, b" " * MAX_RECORD_BYTES + json.dumps(document()).encode())
    assert refused.value.reason == "TooLarge"


def test_a_foreign_key_is_quoted_in_one_short_line(tmp_path: Path) -> None:
    with pytest.raises(AdapterIncompatible) as refused:
        read(tmp_path, document(**{"a\n\x1b[31m" + "b" * 10_000: 1}))
    assert len(refused.value.message) < 500
    assert refused.value.message.isprintable()


@pytest.mark.parametrize("fields", [{"prompt_ids": [9]}, {"answer_ids": [4, 9]}])
def test_a_token_beyond_the_vocabulary_is_of_another_base_model(tmp_path: Path, fields: dict[str, object]) -> None:
    found = recorded(tmp_path, answer(), answer(**fields))
    found.check_vocabulary(10)
    with pytest.raises(AdapterIncompatible, match="has 9 tokens") as refused:
        found.check_vocabulary(9)
    assert refused.value.reason == REFERENCE_MISMATCH


def test_an_answer_that_the_base_model_has_no_positions_for_is_of_another_one(tmp_path: Path) -> None:
    found = recorded(tmp_path, answer(), answer(prompt_ids=[1] * 7))
    longest = 7 + len(found.answers[1].answer_ids)
    found.check_positions(longest)
    with pytest.raises(AdapterIncompatible, match=f"has {longest} tokens with its prompt") as refused:
        found.check_positions(longest - 1)
    assert refused.value.reason == REFERENCE_MISMATCH


def test_what_a_quantized_base_is_called_is_quoted(tmp_path: Path) -> None:
    compared = recorded(tmp_path, answer(), quantization="\x1b[31m\nserved").compare([[-50.0, -50.0]], "float32")
    assert compared.difference.isprintable()


def tokenizer(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
    return {"input_ids": [0] * add_special_tokens + [ord(one) for one in text]}


def test_prompts_are_what_the_base_models_tokenizer_makes_of_their_text(tmp_path: Path) -> None:
    plain, special = answer(prompt="ab", prompt_ids=[97, 98]), answer(prompt="c", prompt_ids=[0, 99])
    recorded(tmp_path, plain).check_prompts(tokenizer)
    recorded(tmp_path, special, special_tokens=True).check_prompts(tokenizer)
    recorded(tmp_path, plain, special).check_prompts(None)  # the folder of a random model
    for answers, fields in (((plain, special), {}), ((special, plain), {"special_tokens": True})):
        with pytest.raises(AdapterIncompatible, match=r"another tokenizer, .* prompt 2") as refused:
            recorded(tmp_path, *answers, **fields).check_prompts(tokenizer)
        assert refused.value.reason == REFERENCE_MISMATCH


@pytest.mark.parametrize(
    ("recorded_in", "here", "off", "agrees"),
    [
        ("float32", "float32", 0.9e-3, True),
        ("float32", "float32", 1.1e-3, False),
        ("float32", "bfloat16", 0.09, True),
        ("bfloat16", "float32", 0.09, True),
        ("float32", "float16", 0.11, False),
        ("bfloat16", "bfloat16", 0.11, False),
    ],
)
def test_how_near_is_enough_depends_on_the_types(
    tmp_path: Path, recorded_in: str, here: str, off: float, agrees: bool
) -> None:
    found = recorded(tmp_path, answer(), answer(), dtype=recorded_in)
    compared = found.compare([[-0.5, -1.0], [-0.5, -1.0 + off]], here)
    assert (compared.answers, compared.tokens) == (2, 4)
    assert compared.largest == pytest.approx(off)
    assert compared.agrees is agrees
    assert (compared.refusal() is None) is agrees
    assert (compared.difference == "") is agrees


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_agrees_with_nothing(tmp_path: Path, number: float) -> None:
    compared = recorded(tmp_path).compare([[number, -1.0]], "bfloat16")
    assert compared.largest == MAX_DIFFERENCE
    assert not compared.agrees


def test_answers_of_a_quantized_base_model_are_only_warned_about(tmp_path: Path) -> None:
    compared = recorded(tmp_path, quantization="x" * 100).compare([[-0.5, -2.0]], "float32")
    assert not compared.agrees
    assert compared.refusal() is None
    assert "quantized by 'x" in compared.difference
    assert len(compared.difference) <= MAX_WARNING_CHARS


def test_a_refusal_and_a_warning_say_by_how_much(tmp_path: Path) -> None:
    compared = recorded(tmp_path).compare([[-0.5, -1.63]], "bfloat16")
    refused = compared.refusal()
    assert refused is not None
    assert (refused.reason, compared.allowed) == (REFERENCE_MISMATCH, ALLOWED_IN_16_BITS)
    assert "differs by 0.63, and 0.1 is allowed" in refused.message
    assert "motet adapter record" in refused.message
    assert len(compared.difference) <= MAX_WARNING_CHARS


def test_a_result_of_another_length_is_a_defect(tmp_path: Path) -> None:
    for computed in ([], [[-0.5]], [[-0.5, -1.0, -1.0]]):
        with pytest.raises(ValueError, match="zip"):
            recorded(tmp_path).compare(computed, "float32")
