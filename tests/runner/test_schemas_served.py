"""Nearly all schemas that clients send are served. Each complete answer is valid, and a refusal names its keyword."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from motet.errors import InvalidRequest
from motet.grammars.compiler import Grammars
from motet.grammars.grammar import Grammar, GrammarForm
from motet_runner.interface import Finish, Sampling
from motet_runner.offline import OfflineEngine, Request
from testbed.tree import ROOT
from tests.runner.random_schemas import Schema, schemas

MODEL = ROOT / "cli" / "motet_cli" / "bundled" / "model"
LEAST_SERVED = 0.9
LEAST_COMPLETE = 0.4
ENDS = ('"', "}", "]", '"}', '",', '"]')
"""A model that never meant to write JSON ends few of its strings and numbers. So these tokens are made likely."""
QUESTION = [{"role": "user", "content": "Answer as JSON: who keeps the lighthouse of Brindle?"}]
WAYS = ({"temperature": 0.0}, {"temperature": 1.5})


def grammar_of(schema: Schema) -> Grammar:
    return Grammar(GrammarForm.JSON_SCHEMA, json.dumps(schema))


def keywords(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from part
        for inner in part.values():
            yield from keywords(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from keywords(inner)


def why_not(grammars: Grammars, schema: Schema) -> str:
    try:
        grammars.try_grammar(grammar_of(schema))
    except InvalidRequest as error:
        return error.message
    return ""


@pytest.mark.parametrize("count", [32, pytest.param(500, marks=pytest.mark.soak)])
def test_schemas_are_served_or_refused_with_their_keyword(count: int) -> None:
    """Mutation: the compiler reads no `enum`, no `maximum` and no `pattern`."""
    given = list(schemas(count, seed=count))
    engine = OfflineEngine(MODEL, kernels="torch", threads=1)
    grammars = Grammars(MODEL / "tokenizer.json", engine.info.vocabulary, engine.info.eos_token_ids)
    refused = {n: why for n, schema in enumerate(given) if (why := why_not(grammars, schema))}
    for n, why in refused.items():
        assert any(word in why for word in keywords(given[n])), (why, given[n])
    served = [schema for n, schema in enumerate(given) if n not in refused]
    print(f"schema_served: {len(served) / count:.3f} of {count}")
    assert len(served) >= LEAST_SERVED * count

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ends = {token: 8.0 for text in ENDS if (token := tokenizer.token_to_id(text)) is not None}
    asked = [(schema, way) for schema in served for way in WAYS]
    requests = [
        Request(
            prompt=QUESTION,
            grammar=grammar_of(schema),
            seed=seed,
            sampling=Sampling(max_tokens=200, logit_bias=ends, **way),
        )
        for seed, (schema, way) in enumerate(asked)
    ]
    complete = 0
    for answer in engine.run(requests):
        schema, _ = asked[answer.number]
        assert answer.finish in (Finish.STOP, Finish.LENGTH), (schema, answer)
        if answer.finish is Finish.STOP:
            complete += 1
            found = json.loads(answer.text)
            assert Draft202012Validator(schema).is_valid(found), (schema, answer.text)
    print(f"schema_valid: 1, of {complete} complete answers of {len(asked)}")
    assert complete >= LEAST_COMPLETE * len(asked)
