"""A grammar begins behind the reasoning: in the masks of all forms, and in answers of the bundled model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from motet.grammars.compiler import Grammars
from motet.grammars.grammar import Grammar, GrammarForm
from motet.reasoning.formats import ExpectedReasoning
from motet.tool_calls.grammar import CallRules
from motet_runner.interface import Finish, NewSequence, Sampling
from motet_runner.offline import OfflineEngine, Request
from testbed.tree import ROOT

MODEL = ROOT / "cli" / "motet_cli" / "bundled" / "model"
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
CALLS = CallRules(format="hermes", tools={"send": {"type": "object"}}, must=True, parallel=False)
FORMS = {
    GrammarForm.JSON_SCHEMA: (json.dumps(SCHEMA), '{"sure": true}'),
    GrammarForm.REGEX: ("yes|no", "no"),
    GrammarForm.LARK: ("start: answer\nanswer: THOUGHT\nTHOUGHT: /yes|no/", "no"),
    GrammarForm.EBNF: ('root ::= "yes" | "no"', "no"),
    GrammarForm.TOOL_CALLS: (CALLS.to_text(), '<tool_call>\n{"name": "send", "arguments": {}}\n</tool_call>'),
}
PROMPT = [{"role": "user", "content": "Is the tide high?"}]


@pytest.fixture(params=["plain", "added", "special"])
def grammars(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Tokenizer, Grammars]:
    """`added` and `special`: each tag is one token."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    if request.param != "plain":
        special = request.param == "special"
        tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tokenizer, Grammars(tmp_path / "tokenizer.json", tokenizer.get_vocab_size(), [1])


def follows(given: tuple[Tokenizer, Grammars], grammar: Grammar, text: str) -> bool:
    tokenizer, made = given
    mask = made.mask(grammar, ())
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    return all(mask.take(token, place) for place, token in enumerate([*tokens, 1]))


@pytest.mark.parametrize("form", [*FORMS])
def test_an_answer_follows_its_grammar_behind_the_reasoning(
    grammars: tuple[Tokenizer, Grammars], form: GrammarForm
) -> None:
    text, right = FORMS[form]
    free = Grammar(form, text, ExpectedReasoning("<think>", "</think>", begun=False))
    begun = Grammar(form, text, ExpectedReasoning("<think>", "</think>", begun=True))
    for grammar, before in ((free, ""), (free, "<think>So {it} is.</think>"), (begun, "So\nit is.</think>\n\n")):
        assert follows(grammars, grammar, before + right)
        assert not follows(grammars, grammar, before + "Well, " + right)
        assert not follows(grammars, grammar, before)
    assert not follows(grammars, begun, right)
    assert not follows(grammars, free, f"<think>{right}")
    assert not follows(grammars, free, f"So it is.</think>{right}")


class _BegunEngine(OfflineEngine):
    begun: str = ""

    def _sequence(self, request: Request, *place: Any) -> NewSequence:
        ids = self.tokenizer.encode(self.begun, add_special_tokens=False)
        return replace(super()._sequence(request, *place), delivered=tuple(ids))


def test_what_the_model_writes_behind_its_reasoning_fits_the_schema() -> None:
    engine = _BegunEngine(MODEL, kernels="torch", threads=1)
    grammar = Grammar(GrammarForm.JSON_SCHEMA, json.dumps(SCHEMA), ExpectedReasoning("<think>", "</think>", begun=True))
    engine.begun = "It is new moon.</think>"
    requests = [
        Request(prompt=PROMPT, grammar=grammar, seed=seed, sampling=Sampling(max_tokens=60, temperature=1.5))
        for seed in range(4)
    ]
    for answer in engine.run(requests):
        assert answer.finish is Finish.STOP
        assert isinstance(json.loads(answer.text)["sure"], bool)
    engine.begun = ""
    for answer in engine.run(requests[:1]):
        assert answer.finish is Finish.LENGTH, "it never ends its reasoning, and may not end the answer before"
