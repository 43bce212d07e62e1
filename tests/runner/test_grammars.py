"""Answers follow their grammars, and greedily they are those of a sampler that masks first."""

import json
import re
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from motet.domain import BASE, ParkMethod, RequestId
from motet.errors import InvalidRequest, MotetError, StructuredOutputUnavailable
from motet.grammars.compiler import MAX_TAKE_SECONDS, Grammars
from motet.grammars.grammar import Grammar, GrammarForm
from motet.grammars.unions import told_apart
from motet_runner import mask_threads
from motet_runner.execute.batch.row_table import TableRow, masked_rows
from motet_runner.execute.sample import row_masks
from motet_runner.execute.sample.host_sampler import Sampler, Samples
from motet_runner.execute.sample.row_masks import RowMasks
from motet_runner.interface import Finish, Logprobs, NewSequence, Sampling
from motet_runner.mask_threads import MaskThreads
from motet_runner.offline import OfflineEngine, Request
from motet_runner.row_mask import RowMask
from testbed.tree import ROOT
from tests.runner.engines import EngineRun, make_device_engine, make_engine, run

MODEL = ROOT / "cli" / "motet_cli" / "bundled" / "model"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["sea", "land"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarForm.JSON_SCHEMA, json.dumps(SCHEMA))
WORD = Grammar(GrammarForm.REGEX, "(yes|no|perhaps)[.!]")
QUESTION = [{"role": "user", "content": "Who keeps the lighthouse of Brindle?"}]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    engine = OfflineEngine(MODEL, kernels="torch", threads=1)
    return Grammars(MODEL / "tokenizer.json", engine.info.vocabulary, engine.info.eos_token_ids)


def ask_with(grammar: Grammar | None, name: str = "a", **changed) -> NewSequence:
    sampling = {"max_tokens": 150} | changed
    others = {key: sampling.pop(key) for key in ("delivered", "seed") if key in sampling}
    prompt = tuple(range(20, 60))
    return NewSequence(
        request=RequestId(name),
        epoch=1,
        prompt=prompt,
        promise=12,
        sampling=Sampling(**sampling),
        grammar=grammar,
        **others,
    )


def masked_first(grammars: Grammars, grammar: Grammar, logits: list[torch.Tensor]) -> list[int]:
    """What a greedy sampler takes that masks these logits before it chooses."""
    mask, tokens = grammars.mask(grammar, ()), list[int]()
    for row in logits:
        bits = np.unpackbits(np.frombuffer(mask.allowed(), np.uint8), count=len(row), bitorder="little")
        tokens.append(int(np.where(bits, row.float().numpy(), -np.inf).argmax()))
        assert mask.take(tokens[-1], len(tokens) - 1)
    return tokens


@pytest.mark.parametrize("kernels", ["torch", "cpp"])
@pytest.mark.parametrize("grammar", [JSON, WORD], ids=["json", "word"])
def test_greedy_tokens_are_those_of_masking_first(
    grammars: Grammars, kernels: str, grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside rows without a grammar, most iterations are decode-only, and the compiled model chooses their tokens."""
    monkeypatch.setattr(mask_threads, "MAX_WAIT_SECONDS", 60.0)  # a row that sits out computes its logits twice
    monkeypatch.setattr(mask_threads, "MAX_WAITS_SECONDS", 60.0)
    logits: list[torch.Tensor] = []

    def tap(requests: list[RequestId], of_rows: torch.Tensor) -> None:
        logits.extend(of_rows[place].clone() for place, one in enumerate(requests) if one == "a")

    engine = make_engine(MODEL, kernels=kernels)
    engine.diagnostics.worker.on_logits = tap
    ran = run(engine, ask_with(grammar), ask_with(None, "b", ignore_eos=True))
    assert ran.tokens["a"] == masked_first(grammars, grammar, logits)
    assert ran.last["a"].finish is Finish.STOP
    assert len(ran.tokens["b"]) == 150


def test_neighbours_get_the_tokens_that_they_would_get_alone() -> None:
    def plain(*with_grammars: NewSequence) -> list[int]:
        return run(make_engine(MODEL, kernels="exact"), ask_with(None, "b"), *with_grammars).tokens["b"]

    assert plain(ask_with(JSON), ask_with(WORD, "c", temperature=1.5, seed=3)) == plain()


def test_drawn_answers_are_valid_at_any_temperature() -> None:
    engine = OfflineEngine(MODEL, kernels="torch", threads=1)
    asked = [
        Request(prompt=QUESTION, grammar=JSON, seed=seed, sampling=Sampling(max_tokens=300, temperature=1.5))
        for seed in range(12)
    ]
    answers = list(engine.run(asked))
    assert {answer.finish for answer in answers} == {Finish.STOP}
    for answer in answers:
        found = json.loads(answer.text)
        assert set(found) == set(SCHEMA["properties"])
        assert 0 <= found["age"] <= 150
        assert len(found["name"]) <= 12
        assert set(found["tags"]) <= {"sea", "land"}
    assert len({answer.text for answer in answers}) > 6


class FixedRules:
    """Allows the same tokens always."""

    def __init__(self, allowed: set[int], vocabulary: int = 16) -> None:
        self._allowed, self._vocabulary = allowed, vocabulary

    def take(self, token: int, place: int) -> bool:
        return token in self._allowed

    def allowed(self) -> bytes:
        tokens = range(self._vocabulary)
        return np.packbits([token in self._allowed for token in tokens], bitorder="little").tobytes()

    failure = InvalidRequest("nothing is allowed")


def row_with(rules: FixedRules, seed: int, **sampling) -> TableRow:
    return TableRow(
        0, RequestId("a"), [1, 2], 1, BASE, Sampling(max_tokens=9, **sampling), seed, 0, mask=RowMask(rules)
    )


def sampled(logits: torch.Tensor, row: TableRow) -> Samples:
    sampler = Sampler(frozenset())
    samples = sampler.sample(logits, [row])
    assert RowMasks(sampler, MaskThreads()).hold(masked_rows([row]), logits, samples, spent=60.0) == []
    return samples


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("others", [{}, {"temperature": 1.0}], ids=["greedy", "mixed"])
def test_greedy_rows_choose_the_largest_logit_that_is_allowed(
    dtype: torch.dtype, others: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups of three, with ties, both zeros, and rows that have nothing left."""
    vocabulary, count = 21, 60
    monkeypatch.setattr(row_masks, "CPU_GROUP", 3 * vocabulary + 1)
    chance = np.random.default_rng(0)
    values = np.array([-np.inf, -3, -0.5, -0.0, 0.0, 0.5, 2, 2.5], dtype=np.float32)
    numbers = chance.choice(values, (count, vocabulary))
    allowed = [set(np.flatnonzero(chance.random(vocabulary) < share).tolist()) for share in np.linspace(0, 0.6, count)]
    rows = [row_with(FixedRules(one, vocabulary), 0) for one in allowed]
    rows.append(row_with(FixedRules({1}, vocabulary), 0, **others))
    logits = torch.from_numpy(np.vstack([numbers, np.zeros((1, vocabulary), np.float32)])).to(dtype)
    sampler, threads = Sampler(frozenset()), MaskThreads()
    samples = sampler.sample(logits, rows)
    assert RowMasks(sampler, threads).hold(masked_rows(rows), logits, samples, spent=60.0) == []
    for row, may, found in zip(numbers, allowed, samples.tokens, strict=False):
        of_allowed = np.where([token in may for token in range(vocabulary)], row, -np.inf)
        largest = int(of_allowed.argmax())
        assert found == (largest if np.isfinite(of_allowed[largest]) and np.isfinite(row.max()) else None)
    assert samples.tokens[-1] == 1


def test_drawn_tokens_have_the_distribution_of_masking_first() -> None:
    allowed, draws = {1, 2, 3, 7}, 1000
    logits = torch.linspace(-1, 2, 16)[None].repeat(1, 1)
    rules = FixedRules(allowed)
    found = Counter(sampled(logits, row_with(rules, seed, temperature=1.0)).tokens[0] for seed in range(draws))
    likely = {token: float(logits[0, token].exp()) for token in allowed}
    total = sum(likely.values())
    expected = {token: draws * one / total for token, one in likely.items()}
    assert set(found) <= allowed
    statistic = sum((found[token] - one) ** 2 / one for token, one in expected.items())
    assert statistic < 16.27, "chi-squared with three degrees of freedom: one in a thousand is above"


def test_log_probabilities_stay_the_models_own() -> None:
    logits = torch.linspace(-1, 2, 16)[None]
    samples = sampled(logits, row_with(FixedRules({3}), 0, logprobs=True, top_logprobs=2))
    logs = logits[0].log_softmax(-1)
    assert samples.tokens == [3]
    one = samples.logprobs[0]
    assert isinstance(one, Logprobs)
    assert one.logprob == pytest.approx(float(logs[3]))
    assert [token for token, _ in one.top] == [15, 14]


def test_a_row_that_may_get_no_token_fails() -> None:
    assert sampled(torch.linspace(-1, 2, 16)[None], row_with(FixedRules(set()), 0)).tokens == [None]
    ran = run(make_engine(MODEL), ask_with(WORD, min_tokens=40), ask_with(None, "b"))
    assert isinstance(ran.last["a"].error, InvalidRequest)
    assert ran.tokens["b"]


@pytest.mark.parametrize("method", list(ParkMethod))
def test_a_parked_answer_goes_on_as_if_it_had_not_been_parked(method: ParkMethod) -> None:
    undisturbed = run(make_engine(MODEL), ask_with(JSON)).tokens["a"]
    engine, ran = make_engine(MODEL), EngineRun()
    engine.set_supervised(True)
    engine.add(ask_with(JSON))
    while len(ran.tokens.get("a", ())) < 7:
        ran.take(engine)
    assert engine.park(RequestId("a"), 1, 12, 12, method)
    ran.take(engine)
    assert engine.resume(RequestId("a"), 1, 12)
    while engine.has_work():
        ran.take(engine)
    assert ran.tokens["a"] == undisturbed


def test_a_moved_answer_goes_on_where_it_stood() -> None:
    whole = run(make_engine(MODEL), ask_with(JSON)).tokens["a"]
    for delivered in (1, 5, len(whole) - 1):
        rest = run(make_engine(MODEL), ask_with(JSON, delivered=tuple(whole[:delivered]))).tokens["a"]
        assert whole[:delivered] + rest == whole


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar(GrammarForm.REGEX, "(open"), "unclosed group"),
        (Grammar(GrammarForm.JSON_SCHEMA, "{"), "not JSON"),
        (Grammar(GrammarForm.JSON_SCHEMA, "[]"), "must be an object"),
        (Grammar(GrammarForm.JSON_SCHEMA, '{"type":"array","uniqueItems":true}'), "uniqueItems"),
        (Grammar(GrammarForm.JSON_SCHEMA, '{"allOf":[{"type":"integer"},{"type":"string"}]}'), "Unsatisfiable"),
        (Grammar(GrammarForm.JSON_SCHEMA, '{"$ref":"http://127.0.0.1/x"}'), "http://127.0.0.1/x"),
        (Grammar(GrammarForm.JSON_SCHEMA, '{"$ref":"#/x"}'), "/x"),
        (Grammar(GrammarForm.JSON_SCHEMA, '{"oneOf":[{"type":"integer"},{"type":"number"}]}'), "Use anyOf"),
        (Grammar(GrammarForm.JSON_SCHEMA, '{"x-guidance":{"lenient":true},"uniqueItems":true}'), "uniqueItems"),
    ],
)
def test_a_grammar_that_cannot_be_served_is_refused_with_the_reason(grammars: Grammars, grammar, says) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(says)) as caught:
        grammars.mask(grammar, ())
    assert "guidance" not in caught.value.message
    assert "start:" not in caught.value.message


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarForm.REGEX, "(a|b|ab|ba)*" * 40),
        Grammar(GrammarForm.REGEX, ".*a.{30}"),
        Grammar(GrammarForm.REGEX, "(" * 2000 + "a" + ")?" * 2000),
        Grammar(GrammarForm.REGEX, "(x{1,1000}){1,1000}"),
        Grammar(GrammarForm.JSON_SCHEMA, json.dumps({"enum": [f"value {n}" for n in range(10_000)]})),
        Grammar(GrammarForm.JSON_SCHEMA, '{"a":' * 900 + "1" + "}" * 900),
        Grammar(
            GrammarForm.JSON_SCHEMA, json.dumps({"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]})
        ),
        Grammar(GrammarForm.EBNF, "root ::= " + " | ".join(f'"value {n}"' for n in range(10_000))),
        Grammar(GrammarForm.EBNF, "root ::= " + " | ".join(f'"{n}" root' for n in range(10_000)) + ' | ""'),
        Grammar(GrammarForm.EBNF, 'root ::= root root | root root root | "a" | [a-z] | ""'),
        Grammar(GrammarForm.EBNF, 'root ::= root "a" | [^b]* root | "x"'),
        Grammar(GrammarForm.EBNF, 'root ::= x{1000} | "z" root\nx ::= (y y){1000}\ny ::= [a-z]{1000}'),
        Grammar(
            GrammarForm.EBNF,
            "\n".join(["root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)), 'r40 ::= "a"?']),
        ),
        Grammar(GrammarForm.LARK, 'start: start start | /(a|b|ab|ba)*/ | ""'),
        Grammar(GrammarForm.LARK, "start: " + "(" * 500 + '"a"' + ")*" * 500),
        Grammar(
            GrammarForm.STRUCTURAL_TAG,
            json.dumps(
                {
                    "structures": [{"begin": f"<f{n}>", "schema": {}, "end": f"</f{n}>"} for n in range(2000)],
                    "triggers": [f"<f{n}>" for n in range(2000)],
                }
            ),
        ),
    ],
    ids=range(16),
)
def test_a_hostile_grammar_costs_little(grammars: Grammars, grammar: Grammar) -> None:
    """It is refused, or its answer ends, or goes on: no step takes long."""
    began = time.thread_time()
    try:
        mask = grammars.mask(grammar, ())
        for place in range(200):
            bits = np.unpackbits(np.frombuffer(mask.allowed(), np.uint8), bitorder="little").nonzero()[0]
            if not len(bits) or not mask.take(int(bits[-1]), place):
                break
    except MotetError:
        pass
    assert time.thread_time() - began < 3


def test_an_engine_whose_host_learns_tokens_late_refuses_grammars() -> None:
    with pytest.raises(StructuredOutputUnavailable):
        make_device_engine(MODEL, kernels="torch").add(ask_with(JSON))


def test_a_delivered_answer_that_breaks_the_grammar_is_refused(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="so far"):
        grammars.mask(WORD, (5, 6, 7))


def of_type(kind: str) -> dict:
    return {"type": kind}


def tagged(value: object) -> dict:
    return {"type": "object", "properties": {"kind": {"const": value}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("branches", "apart"),
    [
        ([of_type("string"), of_type("integer")], True),
        ([of_type("number"), of_type("integer")], False),
        ([{"enum": ["a"]}, {"enum": ["b", 1]}], True),
        ([{"enum": ["a", "b"]}, {"const": "b"}], False),
        ([{"const": 1}, {"const": True}], True),
        ([tagged("a"), tagged("b")], True),
        ([tagged("a"), tagged("a")], False),
        ([tagged("a"), {**tagged("b"), "required": []}], False),
        ([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], True),
        ([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/none"}], False),
        ([{}, of_type("string")], False),
        ([True, of_type("string")], False),
    ],
)
def test_the_branches_of_a_union_are_told_apart(branches: list, apart: bool) -> None:
    defs = {"cat": tagged("cat"), "dog": tagged("dog")}
    assert told_apart({"$defs": defs, "properties": {"x": {"oneOf": branches}}}) is apart
    assert told_apart({"anyOf": branches})


def test_memory_that_runs_out_while_a_row_chooses_again_costs_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The iteration is computed again in parts: the rows before it have taken their tokens already."""
    asked = [ask_with(JSON, name, logprobs=True) for name in "abc"]
    expected = run(make_engine(MODEL, kernels="exact"), *asked)
    logprobs, failing = row_masks.logprobs_of, 5  # the second row of the second iteration
    calls = 0

    def fails_sometimes(*given) -> Logprobs:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise MemoryError
        return logprobs(*given)

    monkeypatch.setattr(row_masks, "logprobs_of", fails_sometimes)
    ran = run(make_engine(MODEL, kernels="exact"), *asked)
    assert calls > failing
    assert ran.tokens == expected.tokens


def test_a_model_without_an_end_token_serves_no_grammar() -> None:
    with pytest.raises(StructuredOutputUnavailable, match="no token that ends"):
        Grammars(MODEL / "tokenizer.json", 4096, []).mask(WORD, ())
    with pytest.raises(StructuredOutputUnavailable, match=r"tokenizer\.json cannot be used"):
        Grammars(MODEL / "none.json", 4096, [0]).mask(WORD, ())


def test_an_engine_without_the_extra_serves_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "motet.grammars.compiler", None)
    engine = make_engine(MODEL)
    with pytest.raises(StructuredOutputUnavailable, match="llguidance"):
        engine.add(ask_with(JSON))
    assert len(run(engine, ask_with(None, ignore_eos=True)).tokens["a"]) == 150


def test_an_ambiguous_grammar_ends_its_own_answer_before_it_delays_others(grammars: Grammars) -> None:
    """Each of its steps takes longer than the one before, and the engine's thread takes them."""
    mask = grammars.mask(Grammar(GrammarForm.EBNF, "root ::= root root | [^`]"), ())
    tokens = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    texts = {token: tokens.decode([token]) for token in range(10, tokens.get_vocab_size())}
    longest = max((token for token, text in texts.items() if "`" not in text), key=lambda token: len(texts[token]))
    steps = list[float]()
    for place in range(200):
        began = time.thread_time()
        taken = mask.take(longest, place)
        steps.append(time.thread_time() - began)
        if not taken:
            break
    assert not taken
    assert all(step < MAX_TAKE_SECONDS * 2 for step in steps[:-1])
    assert mask.allowed() == b""
    assert mask.failure is not None
    assert "takes too much time" in str(mask.failure)


def test_a_line_of_many_brackets_is_searched_in_little_time(grammars: Grammars) -> None:
    """The search holds the interpreter, and every other answer with it."""
    began = time.thread_time()
    grammars.try_grammar(Grammar(GrammarForm.LARK, 'start: "a"\n// ' + "[" * 20_000))
    assert time.thread_time() - began < 1


def test_many_unions_are_looked_at_in_little_time() -> None:
    enums = {
        f"a{n}": {"type": "object", "properties": {"k": {"enum": list(range(300))}}, "required": ["k"]}
        for n in range(100)
    }
    union = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in enums]}
    began = time.thread_time()
    assert not told_apart({"$defs": enums, "properties": {f"p{n}": union for n in range(48)}})
    assert time.thread_time() - began < 1
