"""The bundled model, which knows no tools, calls them under a grammar: what it draws parses and fits the schemas."""

import json

import jsonschema
import pytest

from motet.grammars.grammar import Grammar, GrammarForm
from motet.tool_calls.formats import FORMATS, TOOL_FORMATS, ToolFormatName
from motet.tool_calls.grammar import CallRules
from motet.tool_calls.parser import CallParser
from motet_runner.interface import Finish, Sampling
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


@pytest.fixture(scope="module")
def engine() -> OfflineEngine:
    return OfflineEngine(MODEL, kernels="torch", threads=1)


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_calls_that_the_model_draws_parse_and_fit_their_schemas(engine: OfflineEngine, form: ToolFormatName) -> None:
    modes, asked = list[str](), list[Request]()
    for mode, (tools, must) in MODES.items():
        rules = CallRules(format=form, tools=tools, must=must, parallel=False)
        grammar = Grammar(GrammarForm.TOOL_CALLS, rules.to_text())
        for seed, temperature in ((1, 0.0), (2, 1.5), (3, 1.5)):
            sampling = Sampling(max_tokens=200, temperature=temperature)
            asked.append(Request(prompt=PROMPT, grammar=grammar, seed=seed, sampling=sampling))
            modes.append(mode)
    for answer in engine.run(asked):  # in the order in which they end
        mode = modes[answer.number]
        parser = CallParser(FORMATS[form], MODES[mode][0].keys(), lambda: "id", only_one=True)
        content = parser.feed(answer.text) + parser.flush()
        for call in parser.calls:
            jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
        if mode != "strict":
            assert (answer.finish, content, len(parser.calls), parser.complete) == (Finish.STOP, "", 1, True)
