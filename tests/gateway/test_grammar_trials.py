"""A stranger's grammar is tried in a process that may be killed: it costs others nothing."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers

from motet.errors import InvalidRequest, Overloaded
from motet.grammars.grammar import Grammar, GrammarForm
from motet.reasoning.formats import ExpectedReasoning
from motet_gateway.grammars.trial_processes import MAX_PROCESSES, TrialModel, TrialProcesses
from motet_gateway.grammars.trials import MAX_WAITING, GrammarTrials
from testbed.tree import ROOT
from tests.gateway.conftest import Served

FOLDER = ROOT / "cli" / "motet_cli" / "bundled" / "model"
MODEL = TrialModel(FOLDER / "tokenizer.json", 4096, (0,))


@pytest.fixture
async def tried() -> AsyncIterator[GrammarTrials]:
    found = GrammarTrials()
    yield found
    await found.close()


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
async def test_what_takes_too_much_is_refused(kind: str, tried: GrammarTrials) -> None:
    grammar, says = HOSTILE[kind]
    for tenant in ("a", "b"):
        with pytest.raises(InvalidRequest, match=says):
            await tried.check(grammar, tenant, MODEL)
    await tried.check(schema({"type": "integer"}), "a", MODEL)


def optional(count: int) -> Grammar:
    properties = {f"property{n}": {"type": "string"} for n in range(count)}
    return schema({"type": "object", "properties": properties, "additionalProperties": False})


async def test_what_fails_at_the_first_masks_of_the_models_tokens_is_refused(tried: GrammarTrials) -> None:
    """Mutations: a trial makes masks for bytes, or only the first one."""
    many = Grammar(GrammarForm.REGEX, "(a|b|ab|ba)*" * 60)
    for grammar in (many, optional(500)):
        with pytest.raises(InvalidRequest, match="too many possibilities"):
            await tried.check(grammar, "t", MODEL)
    await tried.check(optional(100), "t", MODEL)
    await tried.check(many, "t", TrialModel(FOLDER / "none.json", 4096, (0,)))  # for bytes


@pytest.mark.parametrize("begun", [False, True])
async def test_a_grammar_is_tried_behind_the_reasoning(begun: bool, tried: GrammarTrials) -> None:
    """Mutations: it is tried without the reasoning, or only where this begins."""
    behind = ExpectedReasoning("<think>", "</think>", begun=begun)
    many = Grammar(GrammarForm.REGEX, "(a|b|ab|ba)*" * 60, behind)
    with pytest.raises(InvalidRequest, match="too many possibilities"):
        await tried.check(many, "t", MODEL)
    with pytest.raises(InvalidRequest, match="Unimplemented keys"):
        await tried.check(replace(schema({"uniqueItems": True}), behind=behind), "t", MODEL)
    await tried.check(replace(optional(100), behind=behind), "t", MODEL)


async def test_a_grammar_is_tried_by_itself_where_a_tokenizer_does_not_write_the_tags(
    tried: GrammarTrials, tmp_path: Path
) -> None:
    """A tokenizer that begins each text with a space. Mutation: only what comes before the end of the reasoning."""
    tokenizer = Tokenizer.from_file(str(MODEL.tokenizer))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    behind = ExpectedReasoning("<think>", "</think>", begun=False)
    with pytest.raises(InvalidRequest, match="too many possibilities"):
        await tried.check(
            Grammar(GrammarForm.REGEX, "(a|b|ab|ba)*" * 60, behind),
            "t",
            MODEL._replace(tokenizer=tmp_path / "tokenizer.json"),
        )


async def test_a_tokenizer_is_read_once_and_few_are_kept(tmp_path: Path) -> None:
    processes = TrialProcesses()
    models = [TrialModel(tmp_path / str(n), 4096, (0,)) for n in range(MAX_PROCESSES + 1)]
    for model in models:
        assert not await processes.tried(schema({}), model)
    kept = list(processes._processes.values())  # noqa: SLF001
    assert len(kept) == MAX_PROCESSES
    assert not await processes.tried(schema({"type": "null"}), models[-1])
    assert list(processes._processes.values()) == kept  # noqa: SLF001
    await processes.close()
    assert all(process.returncode is not None for process in kept)


async def test_a_process_that_died_starts_again(tried: GrammarTrials) -> None:
    await tried.check(schema({}), "t", MODEL)
    (process,) = tried._processes._processes.values()  # noqa: SLF001
    process.kill()
    await process.wait()
    with pytest.raises(Overloaded):
        await tried.check(schema({"title": "1"}), "t", MODEL)
    await tried.check(schema({"title": "1"}), "t", MODEL)


async def test_a_client_that_hangs_up_leaves_the_trial_to_its_end(tried: GrammarTrials) -> None:
    hung_up = asyncio.create_task(tried.check(schema({"title": "1"}), "t", MODEL))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    hung_up.cancel()
    await tried.check(schema({"title": "2"}), "t", MODEL)
    assert len(tried._processes._processes) == 1  # noqa: SLF001


async def test_a_grammar_is_tried_once_for_each_tenant(tried: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def counted(_: TrialProcesses, grammar: Grammar, _model: TrialModel) -> str:
        asked.append(grammar)
        await asyncio.sleep(0)
        return ""

    monkeypatch.setattr(TrialProcesses, "tried", counted)
    one = schema({"type": "object"})
    await asyncio.gather(*(tried.check(one, tenant, MODEL) for tenant in ("a", "b", "a")))
    await tried.check(one, "a", MODEL)
    assert len(asked) == 2


async def test_one_tenant_has_few_that_wait(tried: GrammarTrials, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests with one grammar count once. Mutation: requests are counted."""
    goes_on = asyncio.Event()

    async def waits(*_: object) -> str:
        await goes_on.wait()
        return ""

    monkeypatch.setattr(TrialProcesses, "tried", waits)
    titles = [str(n) for n in range(MAX_WAITING)] + ["0"] * 2 * MAX_WAITING
    waiting = [asyncio.create_task(tried.check(schema({"title": title}), "a", MODEL)) for title in titles]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await tried.check(schema({"title": "one more"}), "a", MODEL)
    other = asyncio.create_task(tried.check(schema({}), "b", MODEL))
    goes_on.set()
    await asyncio.gather(*waiting, other)
    await tried.check(schema({"title": "one more"}), "a", MODEL)


async def test_whoever_comes_waits_for_one_trial_of_each_other_tenant(
    tried: GrammarTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = [], asyncio.Event()

    async def noted(_: TrialProcesses, grammar: Grammar, __: TrialModel) -> str:
        begun.append(json.loads(grammar.text)["title"])
        await goes_on.wait()
        return ""

    monkeypatch.setattr(TrialProcesses, "tried", noted)
    wanted = [("busy", f"{n}") for n in range(MAX_WAITING)] + [("b", "of b"), ("c", "of c")]
    trials = [asyncio.create_task(tried.check(schema({"title": title}), tenant, MODEL)) for tenant, title in wanted]
    await asyncio.sleep(0.01)
    goes_on.set()
    await asyncio.gather(*trials)
    assert begun == ["0", "of b", "of c", "1", "2", "3"]


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
