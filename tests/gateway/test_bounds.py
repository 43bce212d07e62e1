"""The gateway limits what clients send before it does anything with it. Each error names its limit."""

import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.api.v1 import scheduler_pb2
from motet.errors import InvalidRequest, ModelNotFound, MotetError, UnsupportedParameter
from motet.sampling import OPTIONS
from motet_gateway.catalog import Catalog
from motet_gateway.identity.caller import ANONYMOUS
from motet_gateway.model_not_found import NameIndex
from motet_gateway.parameters import (
    MAX_MESSAGES,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
)
from motet_gateway.request_bodies import memory_of
from motet_gateway.tokens.stop_strings import StopStrings
from motet_gateway.unsupported_parameters import UNSUPPORTED
from tests.common.cpu_speed import cpu_unit_seconds

HELLO = [{"role": "user", "content": "Hello"}]


def refused(**more: object) -> MotetError:
    with pytest.raises(MotetError) as caught:
        body = parse(ChatBody, orjson.dumps({"model": "m", "messages": HELLO} | more))
        body.refuse_unsupported()
        body.stops()
    return caught.value


# ------------------------------------------------------------------------------------------------------- stop strings


def test_a_long_stop_string_is_refused_with_its_bounds() -> None:
    error = refused(stop="x" * (MAX_STOP_LENGTH + 1))
    assert error.param == "stop"
    assert f"1 to {MAX_STOP_LENGTH} characters" in error.message


def test_many_stop_strings_are_refused_with_their_bound() -> None:
    error = refused(stop=[f"stop {i}" for i in range(MAX_STOPS + 1)])
    assert error.param == "stop"
    assert f"up to {MAX_STOPS} strings" in error.message


def test_a_stop_string_costs_no_more_memory_than_its_own_length() -> None:
    stop = "ab" * 4000
    tracemalloc.start()
    try:
        matcher = StopStrings([stop])
        for _ in range(100):
            matcher.feed("ab")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20 * len(stop)


def test_the_worst_stop_strings_cost_little_for_each_token() -> None:
    # One is always about to complete; the others begin everywhere in the text that is held back, and never continue.
    held = "ab" * (MAX_STOP_LENGTH // 2 - 1) + "zz"
    others = ["a" + "b" * i + "c" * (MAX_STOP_LENGTH - i - 1) for i in range(1, MAX_STOPS)]
    matcher = StopStrings([held, *others])
    tokens = 5000
    began = time.process_time()
    for _ in range(tokens):
        matcher.feed("ab")
    assert not matcher.stopped
    assert (time.process_time() - began) / tokens < cpu_unit_seconds() / 25


# -------------------------------------------------------------------------------------------------------------- lists


def test_many_stop_tokens_and_biases_are_refused() -> None:
    assert refused(stop_token_ids=[1] * (OPTIONS["stop_token_ids"].most + 1)).param == "stop_token_ids"
    assert refused(logit_bias={str(i): 1 for i in range(OPTIONS["logit_bias"].most + 1)}).param == "logit_bias"


def test_a_chat_of_very_many_turns_is_refused_with_its_bound() -> None:
    error = refused(messages=[{"role": "user", "content": ""}] * 200_000)
    assert error.param == "messages"
    assert str(MAX_MESSAGES) in error.message


@pytest.mark.parametrize(
    ("kind", "field", "element"),
    [
        (ChatBody, "messages", b"1,"),
        (ChatBody, "stop_token_ids", b'"",'),
        (ChatBody, "modalities", b"1,"),
        (TokenizeBody, "messages", b"1,"),
        (DetokenizeBody, "tokens", b'"",'),
    ],
)
def test_a_list_with_many_errors_gets_one_error_message(kind: type, field: str, element: bytes) -> None:
    count = 200_000
    rest = b"" if kind is DetokenizeBody else b'"messages":[{"role":"user"}],' if field != "messages" else b""
    body = b'{"model":"m",' + rest + b'"' + field.encode() + b'":[' + element * count + element[:-1] + b"]}"
    began = time.process_time()
    with pytest.raises(MotetError) as caught:
        parse(kind, body).refuse_unsupported()
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)
    assert time.process_time() - began < 6 * cpu_unit_seconds()  # one search for each string takes more than 20


# --------------------------------------------------------------------------------------------- parameters of others


@pytest.mark.parametrize(
    "more",
    [
        {"length_penalty": 0.5},
        {"length_penalty": True},
        {"thinking_token_budget": 0},
        {"adapter_id": "pirate"},
        {"lora_path": "pirate"},
        {"max_new_tokens": 5},
        {"stop_sequences": ["\n"]},
        {"do_sample": False},
        {"echo": True},
    ],
)
def test_unknown_fields_that_change_answers_or_privacy_are_refused_by_name(more: dict) -> None:
    error = refused(**more)
    (name,) = more
    assert isinstance(error, UnsupportedParameter)
    assert error.param == name
    assert error.message.startswith(f"{name}: ")


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_values_without_an_effect_are_accepted(kind: type) -> None:
    for name, (_, harmless) in UNSUPPORTED.items():
        for value in (None, *harmless):
            body = {"model": "m", "messages": HELLO, "prompt": "x", name: value}
            parse(kind, orjson.dumps(body)).refuse_unsupported()


def test_who_takes_a_template_is_named_where_it_is_refused() -> None:
    with pytest.raises(UnsupportedParameter, match="only /v1/chat/completions and /tokenize take it") as caught:
        parse(CompletionBody, b'{"model":"m","prompt":"x","chat_template":"y"}').refuse_unsupported()
    assert caught.value.param == "chat_template"
    parse(TokenizeBody, orjson.dumps({"messages": HELLO, "chat_template": "y"})).chat()


def test_counting_tokens_refuses_what_an_answer_would_refuse() -> None:
    for more, field in (({"tools": [{}]}, "tools[0].type"), ({"echo": True}, "echo")):
        with pytest.raises(UnsupportedParameter) as caught:
            parse(TokenizeBody, orjson.dumps({"messages": HELLO} | more)).chat()
        assert caught.value.param == field


# -------------------------------------------------------------------------------------------------------------- names


def catalog(count: int) -> Catalog:
    message = scheduler_pb2.Catalog()
    message.groups.add(group="g", served_name="base")
    for i in range(count):
        message.adapters.add(
            ref={"namespace": "default", "name": f"customer-{i:05}"}, model_name=f"customer-{i:05}", group="g"
        )
    return Catalog.of(message)


def seconds_to_miss(catalog: Catalog, name: str) -> float:
    began = time.process_time()
    for _ in range(5):
        with pytest.raises(ModelNotFound):
            catalog.resolve(name, ANONYMOUS)
    return time.process_time() - began


@pytest.mark.parametrize("name", ["custmer-04711", "x" * 90_000, "customer-" * 10_000])
def test_a_wrong_name_among_ten_thousand_costs_about_as_much_as_among_a_hundred(name: str) -> None:
    few, many = catalog(100), catalog(10_000)
    for one in (few, many):
        seconds_to_miss(one, "warm")
    assert seconds_to_miss(many, name) < 10 * seconds_to_miss(few, name) + 0.1


def test_a_long_wrong_name_is_repeated_in_part() -> None:
    with pytest.raises(ModelNotFound) as caught:
        catalog(3).resolve("x" * 90_000, ANONYMOUS)
    assert len(caught.value.message) < 500


@given(st.integers(0, 9_999), st.integers(0, 13), st.sampled_from(["drop", "double", "swap"]))
def test_a_misspelt_name_is_found_among_ten_thousand(number: int, at: int, slip: str) -> None:
    right = f"customer-{number:05}"
    at = min(at, len(right) - 1)
    if slip == "drop":
        wrong = right[:at] + right[at + 1 :]
    elif slip == "double":
        wrong = right[:at] + right[at] + right[at:]
    else:
        wrong = right[:at] + "_" + right[at + 1 :]
    near = NAMES.nearest(wrong)
    assert near
    if at < 9:  # a typing error within the number is another customer's number
        assert right in near


NAMES = NameIndex(f"customer-{i:05}" for i in random.Random(1).sample(range(10_000), 10_000))


def test_suggestions_exist_for_an_empty_index_and_an_empty_name() -> None:
    assert NameIndex([]).nearest("x") == []
    assert NameIndex(["legal"]).nearest("") == ["legal"]


def test_an_empty_chat_to_count_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(TokenizeBody, b'{"messages": []}')
    assert caught.value.param == "messages"


def test_an_error_shows_only_a_part_of_a_value_that_is_not_text() -> None:
    body = parse(
        ChatBody, orjson.dumps({"model": "m", "messages": [{"role": "user", "content": [{"type": "x" * 90_000}]}]})
    )
    with pytest.raises(UnsupportedParameter) as caught:
        body.plain_messages()
    assert len(caught.value.message) < 500


BODIES: dict[str, Callable[[], Any]] = {
    "text": lambda: {"model": "m", "prompt": "the quick brown fox " * 20_000},
    "a rare character": lambda: {"model": "m", "prompt": "the quick brown fox 🙃" * 20_000},
    "objects": lambda: {"model": "m", "prompt": "a", "metadata": [{"a": {}}] * 40_000},
    "strings": lambda: {"model": "m", "prompt": "a", "metadata": [f"{n:x}" for n in range(90_000)]},
    "lists": lambda: {"model": "m", "prompt": "a", "metadata": [[]] * 90_000},
    "token ids": lambda: {"model": "m", "prompt": list(range(300, 200_300))},
    "lists of token ids": lambda: {"model": "m", "prompt": [list(range(300, 3300))] * 100},
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_takes_about_as_much_memory_as_is_counted(kind: str) -> None:
    content = orjson.dumps(BODIES[kind]())
    tracemalloc.start()
    try:
        body = parse(CompletionBody, content)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert body.model == "m"
    assert taken <= 1.5 * memory_of(content)
    assert memory_of(content) <= 10 * taken
