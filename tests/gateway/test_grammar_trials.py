"""A stranger's grammar is tried in a process that may be killed: it costs others nothing."""

import asyncio
import json
import time

import pytest

from motet.errors import InvalidRequest, Overloaded
from motet.grammars.grammar import Grammar, GrammarForm
from motet_gateway.grammars import trials
from motet_gateway.grammars.trials import MAX_WAITING, GrammarTrials
from tests.gateway.conftest import Served


def schema(content: object) -> Grammar:
    return Grammar(GrammarForm.JSON_SCHEMA, json.dumps(content))


def chain(links: int) -> Grammar:
    """Its compiler follows it by recursion."""
    of_next = {f"a{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(links)}
    return schema({"$defs": of_next | {f"a{links}": {"type": "integer"}}, "$ref": "#/$defs/a0"})


HOSTILE = {
    "time": (schema({"type": "integer", "multipleOf": 999_983}), "takes more than 0.5 s"),
    "memory": (Grammar(GrammarForm.REGEX, "a?" * 20_000), "takes more than 0.5 s|needs more than 256 MiB"),
    "recursion": (chain(2000), "nested too deeply"),
}


@pytest.mark.parametrize("kind", HOSTILE)
async def test_what_takes_too_much_is_refused(kind: str) -> None:
    grammar, says = HOSTILE[kind]
    tried = GrammarTrials()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=says):
            await tried.check(grammar, "t")


async def test_a_grammar_is_tried_once_for_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def counted(grammar: Grammar) -> str:
        asked.append(grammar)
        await asyncio.sleep(0)
        return ""

    monkeypatch.setattr(trials, "_try", counted)
    tried, one = GrammarTrials(), schema({"type": "object"})
    await asyncio.gather(*(tried.check(one, tenant) for tenant in ("a", "b", "a")))
    await tried.check(one, "a")
    assert len(asked) == 2


async def test_one_tenant_has_few_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = asyncio.Event()

    async def waits(_: Grammar) -> str:
        await goes_on.wait()
        return ""

    monkeypatch.setattr(trials, "_try", waits)
    tried = GrammarTrials()
    waiting = [asyncio.create_task(tried.check(schema({"title": str(n)}), "a")) for n in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await tried.check(schema({"title": "one more"}), "a")
    other = asyncio.create_task(tried.check(schema({}), "b"))
    goes_on.set()
    await asyncio.gather(*waiting, other)
    await tried.check(schema({"title": "one more"}), "a")


async def test_a_refusal_names_the_field_and_the_keyword(served: Served) -> None:
    body = {"model": "tiny", "prompt": "x", "guided_json": {"type": "array", "uniqueItems": True}}
    answer = await served.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "guided_json"
    assert error["message"] == 'guided_json: the grammar cannot be served: Unimplemented keys: ["uniqueItems"]'
    assert not served.cluster.runners[0].submits


async def test_others_are_answered_meanwhile(served: Served) -> None:
    grammar, _ = HOSTILE["time"]
    slow = asyncio.create_task(
        served.http.post("/v1/completions", json={"model": "tiny", "prompt": "x", "json_schema": grammar.text})
    )
    began = time.monotonic()
    assert (await served.http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})).status_code == 200
    assert not slow.done()
    assert time.monotonic() - began < 20
    assert (await slow).status_code == 400


async def test_copies_of_a_large_grammar_count(served: Served) -> None:
    body = {"model": "tiny", "prompt": ["x"] * 128, "n": 8, "regex": "a" * 200_000, "max_tokens": 1}
    answer = await served.http.post("/v1/completions", json=body)
    assert answer.status_code == 503
    assert served.gateway.bodies.held == 0
