"""Lists of tokens bind an answer as a grammar does, also beside one."""

import json
import time

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from motet.domain import RequestId
from motet.errors import InvalidRequest, StructuredOutputUnavailable
from motet.grammars.compiler import Grammars
from motet.grammars.grammar import Grammar, GrammarForm
from motet_runner import mask_threads
from motet_runner.interface import Finish, NewSequence, Sampling
from motet_runner.listed_tokens import ListedTokens
from testbed.tree import ROOT
from tests.common.cpu_speed import cpu_unit_seconds
from tests.runner.engines import make_device_engine, make_engine, run

MODEL = ROOT / "cli" / "motet_cli" / "bundled" / "model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
JSON = Grammar(
    GrammarForm.JSON_SCHEMA,
    json.dumps({"type": "array", "items": {"enum": ["sea", "land"]}, "minItems": 3, "maxItems": 4}),
)
FEW = frozenset({300, 400, 500, 600})


def ask(name: str = "a", grammar: Grammar | None = None, delivered: tuple[int, ...] = (), **sampling) -> NewSequence:
    return NewSequence(
        request=RequestId(name),
        epoch=1,
        prompt=tuple(range(20, 60)),
        promise=12,
        sampling=Sampling(**{"max_tokens": 40} | sampling),
        seed=5,
        grammar=grammar,
        delivered=delivered,
    )


def rules(vocabulary: int = 20, delivered: tuple[int, ...] = (), **sampling) -> ListedTokens:
    return ListedTokens(Sampling(max_tokens=9, **sampling), vocabulary, delivered)


def tokens_of(allowed: bytes) -> set[int]:
    return set(np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little").nonzero()[0].tolist())


def test_only_allowed_tokens_are_taken() -> None:
    listed = rules(allowed_token_ids=frozenset({3, 19}))
    assert tokens_of(listed.allowed()) == {3, 19}
    assert [listed.take(token, 0) for token in (4, 3)] == [False, True]


def test_a_word_of_one_token_is_never_taken() -> None:
    listed = rules(bad_words=((3,),))
    assert not listed.take(3, 0)
    assert tokens_of(listed.allowed()) == set(range(20)) - {3}


def test_a_word_is_refused_at_its_last_token() -> None:
    listed = rules(bad_words=((1, 2, 3), (2, 4), (7, 7)))
    for place, token in enumerate((7, 1, 1, 2)):
        assert listed.take(token, place)
    assert not listed.take(3, 4)
    assert not listed.take(4, 4)
    assert tokens_of(listed.allowed()) == set(range(20)) - {3, 4}
    assert listed.take(5, 4)
    assert listed.take(3, 5)


def test_many_words_cost_little_beside_a_long_one() -> None:
    """Of 128 texts in 4,096 bytes one may have 1,000 tokens. The others are not compared with as many."""
    short = tuple((3, 1, end) for end in range(4, 260))
    listed = rules(vocabulary=300, bad_words=((*[1] * 999, 2), *short), delivered=(1,) * 5000)
    began = time.thread_time()
    for place in range(5000, 5100):
        assert listed.take(1, place)
        listed.allowed()
    assert time.thread_time() - began < 0.6 * cpu_unit_seconds(), "0.3 ms for a token and a mask"


def test_a_place_may_come_again() -> None:
    listed = rules(bad_words=((1, 2),))
    assert listed.take(1, 0)
    assert listed.take(5, 0)
    assert listed.take(2, 1)


def test_a_refused_token_sets_the_grammar_back_too() -> None:
    grammar = Grammars(MODEL / "tokenizer.json", 1536, [0]).mask(Grammar(GrammarForm.REGEX, "abc[xy]d"), ())
    a, b, c, x, y, d = (TOKENIZER.token_to_id(one) for one in "abcxyd")
    listed = ListedTokens(Sampling(max_tokens=9, bad_words=((x,),)), 1536, (), grammar)
    for place, token in enumerate((a, b, c, y)):
        assert listed.take(token, place)
    assert not listed.take(x, 3)
    assert tokens_of(listed.allowed()) == {y}
    assert listed.take(y, 3)
    assert listed.take(d, 4)


def test_delivered_tokens_count() -> None:
    assert not rules(delivered=(9, 1), bad_words=((1, 2),)).take(2, 2)


def test_what_leaves_no_token_says_so() -> None:
    listed = rules(allowed_token_ids=frozenset({3}), bad_words=((3,),))
    assert listed.failure is None
    assert tokens_of(listed.allowed()) == set()
    assert listed.failure is not None
    assert "leave no token" in listed.failure.message


@pytest.mark.parametrize("kernels", ["torch", "exact"])
def test_greedily_it_is_the_best_of_the_allowed_tokens(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "MAX_WAIT_SECONDS", 60.0)  # a row that sits out computes its logits twice
    monkeypatch.setattr(mask_threads, "MAX_WAITS_SECONDS", 60.0)
    logits: list[torch.Tensor] = []
    engine = make_engine(MODEL, kernels=kernels)
    engine.diagnostics.worker.on_logits = lambda _, of_rows: logits.extend(row.clone() for row in of_rows)
    ran = run(engine, ask(allowed_token_ids=FEW))
    listed = sorted(FEW)
    assert ran.tokens["a"] == [listed[int(row[listed].argmax())] for row in logits]
    assert (ran.last["a"].finish, len(ran.tokens["a"])) == (Finish.LENGTH, 40)


def test_drawn_tokens_are_allowed_ones() -> None:
    ran = run(make_engine(MODEL), ask(allowed_token_ids=FEW, temperature=1.5), ask("b", ignore_eos=True))
    assert set(ran.tokens["a"]) <= FEW
    assert len(set(ran.tokens["a"])) > 1
    assert ran.tokens["b"] == run(make_engine(MODEL), ask("b", ignore_eos=True)).tokens["b"]


def test_a_forbidden_word_is_nowhere_in_the_answer() -> None:
    plain = run(make_engine(MODEL), ask()).tokens["a"]
    for word in (tuple(plain[2:3]), tuple(plain[3:6])):
        tokens = run(make_engine(MODEL), ask(bad_words=(word,))).tokens["a"]
        assert tokens[: plain.index(word[0])] == plain[: plain.index(word[0])]
        assert all(tuple(tokens[at : at + len(word)]) != word for at in range(len(tokens)))


def test_both_bind_an_answer_with_a_grammar() -> None:
    plain = run(make_engine(MODEL), ask(grammar=JSON)).tokens["a"]
    word = tuple(plain[1:3])
    ran = run(make_engine(MODEL), ask(grammar=JSON, bad_words=(word,), max_tokens=150))
    assert ran.last["a"].finish is Finish.STOP
    assert ran.tokens["a"] != plain
    assert all(tuple(ran.tokens["a"][at : at + 2]) != word for at in range(len(ran.tokens["a"])))


def test_a_moved_answer_goes_on_where_it_stood() -> None:
    plain = run(make_engine(MODEL), ask()).tokens["a"]
    asked = {"bad_words": (tuple(plain[3:5]),), "grammar": None}
    whole = run(make_engine(MODEL), ask(**asked)).tokens["a"]
    for delivered in (1, 4, 9):
        rest = run(make_engine(MODEL), ask(**asked, delivered=tuple(whole[:delivered]))).tokens["a"]
        assert (whole[:delivered] + rest)[: len(whole)] == whole


def test_an_answer_that_may_have_no_token_ends_with_an_error() -> None:
    ran = run(make_engine(MODEL), ask(allowed_token_ids=frozenset({300}), bad_words=((300, 300),)), ask("b"))
    assert ran.tokens["a"] == [300]
    assert ran.last["a"].finish is Finish.FAILED
    assert "leave no token" in ran.last["a"].error.message
    assert len(ran.tokens["b"]) > 1


@pytest.mark.parametrize("sampling", [{"allowed_token_ids": frozenset({1536})}, {"bad_words": ((1, 2**32 - 1),)}])
def test_a_token_that_the_model_has_not_is_refused(sampling: dict) -> None:
    with pytest.raises(InvalidRequest, match="not in the vocabulary of 1536 tokens"):
        make_engine(MODEL).add(ask(**sampling))


def test_an_engine_whose_host_learns_tokens_late_refuses_them() -> None:
    with pytest.raises(StructuredOutputUnavailable):
        make_device_engine(MODEL, kernels="torch").add(ask(allowed_token_ids=FEW))
