"""The bundled model, which knows no tools, calls them under a grammar: what it draws parses and fits the schemas."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from motet.grammars.grammar import Grammar, GrammarForm
from motet.tool_calls.formats import FORMATS, TOOL_FORMATS, ToolFormatName
from motet.tool_calls.grammar import CallRules
from motet.tool_calls.parser import CallDelta, CallParser
from motet_runner.interface import Finish, NewSequence, Sampling
from motet_runner.offline import OfflineEngine, Request
from testbed.tree import ROOT

MODEL = ROOT / "cli" / "motet_cli" / "bundled" / "model"
TOOLS = {
    "look_up": {
        "type": "object",
        "properties": {"what": {"type": "string", "maxLength": 8}, "most": {"type": "integer", "maximum": 9}},
        "required": ["what"],
        "additionalProperties": False,
    },
    "ring": {"type": "object", "properties": {"loud": {"type": "boolean"}}, "additionalProperties": False},
}
PROMPT = [{"role": "user", "content": "Who keeps the lighthouse of Brindle?"}]
MODES = {"required": (TOOLS, True), "named": ({"ring": TOOLS["ring"]}, True), "strict": (TOOLS, False)}


class _BegunEngine(OfflineEngine):
    """Goes on behind the beginning of a call, which the model would not write by itself."""

    begun: str = ""

    def _sequence(self, request: Request, *place: Any) -> NewSequence:
        ids = self.tokenizer.encode(self.begun, add_special_tokens=False)
        return replace(super()._sequence(request, *place), delivered=tuple(ids))


@pytest.fixture(scope="module")
def engine() -> _BegunEngine:
    return _BegunEngine(MODEL, kernels="torch", threads=1)


@pytest.mark.parametrize("form", TOOL_FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_calls_that_the_model_draws_parse_and_fit_their_schemas(
    engine: _BegunEngine, form: ToolFormatName, mode: str
) -> None:
    tools, must = MODES[mode]
    rules = CallRules(format=form, tools=tools, must=must, parallel=False)
    grammar = Grammar(GrammarForm.TOOL_CALLS, rules.to_text())
    engine.begun = "" if must else FORMATS[form].begin + FORMATS[form].opening
    asked = [
        Request(prompt=PROMPT, grammar=grammar, seed=seed, sampling=Sampling(max_tokens=200, temperature=temperature))
        for seed, temperature in ((1, 0.0), (2, 1.5), (3, 1.5))
    ]
    for answer in engine.run(asked):
        parser = CallParser(FORMATS[form], tools.keys(), lambda: "id", only_one=True)
        said = parser.feed(engine.begun + answer.text) + parser.flush()
        for call in parser.calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
        assert all(isinstance(one, CallDelta) for one in said)
        assert (len(parser.calls), parser.complete) == (1, True)
        assert answer.finish == Finish.STOP or not must
