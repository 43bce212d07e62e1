"""Tests of the check that compares the stack's answers with the reference."""

import torch

from tests.stack.served_models import NEAR_TIE, departures


def test_the_references_own_answer_has_no_departure() -> None:
    logits = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    assert departures(logits, logits.argmax(dim=1).tolist()) == []


def test_a_wrong_token_after_a_near_tie_is_found() -> None:
    logits = torch.tensor([[1.0, 1.0 - NEAR_TIE / 2, 0.0], [2.0, 0.0, 1.0]])
    found = departures(logits, [1, 2])
    assert [position for position, _ in found] == [0, 1]
    assert found[0][1] < NEAR_TIE < found[1][1]


def test_at_a_near_tie_a_third_token_is_found() -> None:
    """It is not one of the two tokens that are equally good."""
    [(_, gap)] = departures(torch.tensor([[1.0, 1.0 - NEAR_TIE / 2, 0.0]]), [2])
    assert gap > NEAR_TIE
