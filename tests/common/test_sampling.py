"""Each option of sampling is declared once, and every door reads that: HTTP, gRPC, the library and a model's files."""

import ast
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from motet.api.v1 import runner_pb2
from motet.asset_fields import AssetFields
from motet.errors import InvalidRequest, ModelFolderError
from motet.sampling import IN_BODIES, OPTIONS, Biases, Flag, Number, Range, Sampling, TokenIds, TokenLists
from motet_gateway import parameters
from motet_gateway.openapi import document
from motet_runner.generate_service import sequence_of
from testbed.tree import ROOT
from tests.runner.plan.fake_device import VOCABULARY, make_planner, new
from tests.support.sampling_values import right_values

NAN, INFINITE, MOST = math.nan, math.inf, 512
BY_BODY = [*IN_BODIES, "max_tokens", "logprobs", "top_logprobs"]


def wrong_values(name: str) -> list[Any]:
    match OPTIONS[name]:
        case Number(lowest=lowest, highest=highest, above=above, whole=whole):
            wrong = [lowest if above else lowest - 1, -INFINITE, NAN, "much", True, [1], -(2**70)]
            wrong += [1.5] * whole + [MOST + 1] * (name == "min_tokens")
            return [*wrong, *([] if highest is None else [highest + 1, INFINITE, 2**70])]
        case TokenLists(most=most, longest=longest):
            return [[[-1]], [["x"]], [[True]], [[VOCABULARY]], [[]], [[1] * (longest + 1)], [[1]] * (most + 1), [5], 5]
        case TokenIds(most=most, least=least):
            return [
                *([[]] if least else []),
                [-1],
                ["x"],
                [1.5],
                [True],
                [VOCABULARY],
                [2**40],
                list(range(most + 1)),
                5,
                "5",
            ]
        case Biases(most=most):
            few = [{f"{VOCABULARY}": 1}, {"-1": 1}, {"x": 1}, {"1" * 5000: 1}, {"1": NAN}, {"1": -INFINITE}, {"1": "x"}]
            return [*few, {"1": 100.5}, {"1": None}, {f"{one}": 1 for one in range(most + 1)}, [1], 5]
    return ["yes", 1, [True]]


def engine(sampling: Sampling) -> None:
    make_planner(pages=64).commands.add(replace(new("a"), sampling=sampling))


def by_library(name: str, value: Any) -> None:
    engine(Sampling(**{"max_tokens": MOST, name: value}).checked(VOCABULARY))


def message_with(name: str, value: Any) -> runner_pb2.Sampling | None:
    """None: no message can have this value."""
    if isinstance(value, bool) != isinstance(OPTIONS[name], Flag):
        return None
    try:
        said = {int(key): bias for key, bias in value.items()} if isinstance(value, dict) else value
        if isinstance(OPTIONS[name], TokenLists):
            said = [runner_pb2.Tokens(ids=tokens) for tokens in value]
        message = runner_pb2.Sampling(**{"max_tokens": MOST, name: said})
    except (TypeError, ValueError):
        return None
    has_it = name == "max_tokens" or name in [field.name for field, _ in message.ListFields()]
    return message if has_it else None


def by_message(message: runner_pb2.Sampling) -> Sampling:
    """As the engine's process gets it."""
    submit = runner_pb2.Submit(request="a", choices=[runner_pb2.Choice()], prompt_ids=[1], sampling=message)
    sampling = pickle.loads(
        pickle.dumps(sequence_of(submit, tuple(submit.prompt_ids), base_digest=""), protocol=5)
    ).sampling
    engine(sampling)
    return sampling


def of_request(said: dict[str, Any], defaults: dict[str, Any]) -> Sampling:
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "max_tokens": MOST}
    body = parameters.parse(parameters.ChatBody, json.dumps({"model": "m"} | chat | said).encode())
    body.refuse_unsupported()
    text = SimpleNamespace(defaults=defaults, vocabulary=VOCABULARY)
    return Sampling.from_proto(parameters.sampling(body, text, max_tokens=body.max_tokens))


def by_body(name: str, value: Any) -> Sampling:
    return of_request({name: value}, {})


def by_file(name: str, value: Any, folder: Path) -> Sampling:
    """The file's value in a request that says nothing."""
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    return of_request({}, AssetFields(folder).sampling)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_value_gets_the_same_sentence_by_every_door(name: str, tmp_path: Path) -> None:
    doors = 1
    for value in wrong_values(name):
        with pytest.raises(InvalidRequest, match=rf"^{name}\b.* (must|vocabulary)\b.*\.$") as refused:
            by_library(name, value)
        said = str(refused.value)
        assert len(said) < 200 + 5000 * (name == "logit_bias")
        assert str(refused.value.param).partition(".")[0].partition("[")[0] == name
        if name in BY_BODY:
            with pytest.raises(InvalidRequest) as refused_body:
                by_body(name, value)
            assert (str(refused_body.value), refused_body.value.param) == (said, refused.value.param)
        if (message := message_with(name, value)) is not None:
            doors += 1
            with pytest.raises(InvalidRequest) as refused_message:
                by_message(message)
            assert str(refused_message.value) == said
        if OPTIONS[name].of_model:
            with pytest.raises(ModelFolderError) as refused_file:
                by_file(name, value, tmp_path)
            assert f"generation_config.json: {said} Correct" in str(refused_file.value)
    assert doors > 1 or name in {"ignore_eos", "logprobs"}  # a message cannot have them wrong


@pytest.mark.parametrize("name", OPTIONS)
def test_a_value_at_an_end_reaches_the_engine_by_every_door(name: str, tmp_path: Path) -> None:
    for value in right_values(name, VOCABULARY):
        by_library(name, value)
        stored = OPTIONS[name].check(name, value)
        if (message := message_with(name, value)) is not None:
            assert getattr(by_message(message), name) == stored
        if name in BY_BODY:
            assert getattr(by_body(name, value), name) == stored
        if OPTIONS[name].of_model:
            assert getattr(by_file(name, value, tmp_path), name) == stored


@pytest.mark.parametrize("name", [name for name, one in OPTIONS.items() if isinstance(one, Number) and one.above])
def test_the_smallest_number_above_zero_is_not_the_default(name: str, tmp_path: Path) -> None:
    doors = [by_body(name, 1e-46), Sampling(**{"max_tokens": MOST, name: 1e-46})]
    if OPTIONS[name].of_model:
        doors.append(by_file(name, 1e-46, tmp_path))
    assert {getattr(one.checked(VOCABULARY), name) for one in doors} == {1e-6}


def test_a_token_has_one_name() -> None:
    with pytest.raises(InvalidRequest, match="must have token ids, which are integers, not '01'"):
        by_body("logit_bias", {"1": 5, "01": -100})
    with pytest.raises(InvalidRequest, match=r"must have token ids, which are integers\."):
        by_body("stop_token_ids", [1e2])


@pytest.mark.parametrize("value", [False, 0.0])
def test_a_length_that_is_no_integer_gets_the_sentence_of_the_option(value: object) -> None:
    with pytest.raises(InvalidRequest, match="max_tokens must be an integer"):
        by_body("max_tokens", value)


def test_a_message_holds_no_defaults() -> None:
    message = Sampling(max_tokens=1, top_p=float("1"), stop_token_ids=frozenset([]), logit_bias={}).to_proto()
    assert [field.name for field, _ in message.ListFields()] == ["max_tokens"]


def test_a_gateway_checks_an_option_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(Range, "check", lambda _, name, value: checked.append((name, value)))
    by_body("temperature", 0.5)
    assert checked.count(("temperature", 0.5)) == 1


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_a_field_of_the_message(name: str) -> None:
    types = {
        Number: FieldDescriptor.TYPE_FLOAT,
        TokenIds: FieldDescriptor.TYPE_UINT32,
        TokenLists: FieldDescriptor.TYPE_MESSAGE,
        Biases: FieldDescriptor.TYPE_MESSAGE,
    }
    option, described = OPTIONS[name], runner_pb2.Sampling.DESCRIPTOR.fields_by_name[name]
    wanted = (
        FieldDescriptor.TYPE_UINT32
        if getattr(option, "whole", False)
        else types.get(type(option), FieldDescriptor.TYPE_BOOL)
    )
    assert described.type == wanted
    assert described.is_repeated == isinstance(option, TokenIds | TokenLists | Biases)
    assert (name == "prompt_logprobs") == described.has_presence


def test_the_message_has_no_other_field_but_the_grammar_and_what_is_before_it() -> None:
    described = runner_pb2.Sampling.DESCRIPTOR
    grammar = {field.name for field in described.oneofs_by_name["grammar"].fields} | {"reasoning"}
    assert {field.name for field in described.fields} - grammar == OPTIONS.keys()


@pytest.mark.parametrize("name", IN_BODIES)
def test_an_option_is_described(name: str) -> None:
    schemas = document(metrics=True)["components"]["schemas"]
    for body in ("ChatBody", "CompletionBody"):
        described = schemas[body]["properties"][name]
        assert described["anyOf"][0] == OPTIONS[name].schema()
        assert ("model's own default" in described["description"]) == OPTIONS[name].of_model


def attributes_read(code: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.ctx, ast.Load)}


def test_a_longer_name_or_a_comment_is_no_use_of_an_option() -> None:
    assert attributes_read("x = a.min_p_of(b)  # a.top_p\na.top_k = a.min_p") == {"min_p_of", "min_p"}


@pytest.mark.parametrize("name", OPTIONS)
def test_its_module_computes_it(name: str) -> None:
    module = ROOT / "services/gpu-runner/motet_runner" / f"{OPTIONS[name].applied_by.replace('.', '/')}.py"
    assert name in attributes_read(module.read_text())
