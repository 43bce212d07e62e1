"""A tenant's next request with a grammar gets a copy, and nobody else's."""

import json
from collections.abc import Sequence

import pytest
from llguidance import LLMatcher

from motet.errors import InvalidRequest
from motet.grammars import kept
from motet.grammars.compiler import Grammars
from motet.grammars.grammar import Grammar, GrammarForm
from motet.grammars.kept import KeptGrammars
from motet.reasoning.formats import ExpectedReasoning
from testbed.tree import ROOT

FILE = ROOT / "cli" / "motet_cli" / "bundled" / "model" / "tokenizer.json"
WORD = Grammar(GrammarForm.REGEX, "(yes|no|perhaps)[.!]")


class Counted(Grammars):
    """Also notes what it has compiled."""

    def __init__(self) -> None:
        super().__init__(FILE, 4096, [0])
        self.of: list[Grammar] = []

    def compiled(self, grammar: Grammar) -> LLMatcher:
        self.of.append(grammar)
        return super().compiled(grammar)


def word(number: int) -> Grammar:
    return Grammar(GrammarForm.REGEX, f"yes|no{number}")


def spell(made: KeptGrammars, grammar: Grammar, *, tenant: str = "a", delivered: Sequence[int] = ()) -> bytes:
    """Every mask along one answer."""
    mask, masks = made.mask(grammar, delivered, tenant=tenant), b""
    for place in range(len(delivered), len(delivered) + 20):
        bits = mask.allowed()
        masks += bits
        lowest = int.from_bytes(bits, "little") & -int.from_bytes(bits, "little")
        token = lowest.bit_length() - 1
        if token == 0:
            break
        assert mask.take(token, place)
    return masks


def test_the_next_request_gets_a_copy_at_its_beginning() -> None:
    """Mutation: the kept matcher itself."""
    grammars = Counted()
    made = KeptGrammars(grammars)
    first = spell(made, WORD)
    assert spell(made, WORD) == first
    assert grammars.of == [WORD]


def test_a_request_that_has_tokens_goes_on_behind_them() -> None:
    grammars = Counted()
    made = KeptGrammars(grammars)
    token = next(one for one in range(1, 4096) if made.mask(WORD, (), tenant="a").take(one, 0))
    behind = spell(made, WORD, delivered=(token,))
    assert behind == spell(KeptGrammars(Counted()), WORD, delivered=(token,))
    assert spell(made, WORD) != behind
    with pytest.raises(InvalidRequest, match="does not follow"):
        made.mask(WORD, (token, token, token), tenant="a")
    assert grammars.of == [WORD]


def test_each_tenant_has_its_own() -> None:
    """Also by what a grammar is behind. Mutation: one key without the tenant."""
    grammars = Counted()
    made = KeptGrammars(grammars)
    behind = Grammar(WORD.form, WORD.text, ExpectedReasoning("<think>", "</think>", begun=True))
    for _ in range(2):
        for tenant in ("a", "b"):
            made.mask(WORD, (), tenant=tenant)
            made.mask(behind, (), tenant=tenant)
    assert grammars.of == [WORD, behind, WORD, behind]


def test_the_oldest_of_a_tenant_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_OF_TENANT", 3)
    grammars = Counted()
    made = KeptGrammars(grammars)
    for number in (0, 1, 2, 0, 3, 0, 1):
        made.mask(word(number), (), tenant="a")
    assert grammars.of == [word(0), word(1), word(2), word(3), word(1)]


def test_who_keeps_most_gives_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "BYTES_A_SECOND", 0)
    text = "x" * 1000
    monkeypatch.setattr(kept, "MAX_BYTES", 8 * (len(text) + 1))
    grammars = Counted()
    made = KeptGrammars(grammars)

    def large(number: int) -> Grammar:
        return Grammar(GrammarForm.REGEX, text + str(number))

    made.mask(large(0), (), tenant="quiet")
    for number in range(9):
        made.mask(large(number), (), tenant="flood")
    grammars.of.clear()
    made.mask(large(0), (), tenant="quiet")
    made.mask(large(8), (), tenant="flood")
    assert not grammars.of
    made.mask(large(0), (), tenant="flood")
    assert grammars.of == [large(0)]


def test_what_takes_too_much_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {f"field_{number}": {"type": "string", "maxLength": 40} for number in range(100)}
    large = Grammar(GrammarForm.JSON_SCHEMA, json.dumps({"type": "object", "properties": properties}))
    monkeypatch.setattr(kept, "BYTES_A_SECOND", 1 << 40)
    grammars = Counted()
    made = KeptGrammars(grammars)
    for _ in range(2):
        made.mask(large, (), tenant="a")
    assert grammars.of == [large, large]


def test_what_cannot_be_served_is_refused_each_time() -> None:
    grammars = Counted()
    made = KeptGrammars(grammars)
    wrong = Grammar(GrammarForm.REGEX, "(")
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            made.mask(wrong, (), tenant="a")
    assert grammars.of == [wrong, wrong]
