"""What `benchmarks.memory` asks for, and what it reads from a step trace."""

import random

import pytest

from benchmarks.engine_run import Ask
from benchmarks.memory import END, LARGEST_BIAS, LARGEST_PENALTY, REPEATED, TAUGHT, ForcedClient, held_in

NOISE = 0.4
"""The most by which the model prefers one token to another"""


@pytest.mark.parametrize("length", [1, 2, 3, 58, 100, 101, 500, 2000])
def test_an_answer_ends_by_itself_about_where_it_should_and_nobody_is_told(length: int) -> None:
    body = ForcedClient(0).body_of(Ask((5,) * 20, length))
    assert "min_tokens" not in body
    assert body["max_tokens"] == 2028
    biases, penalty = body["logit_bias"], body["frequency_penalty"]
    assert 0 < penalty <= LARGEST_PENALTY
    assert all(abs(bias) <= LARGEST_BIAS for bias in biases.values())
    chance = random.Random(length)
    tokens: list[int] = []
    while not tokens or tokens[-1] != END:
        logits = {token: biases.get(str(token), 0) - penalty * tokens.count(token) for token in range(6)}
        tokens.append(max(logits, key=lambda token: logits[token] + chance.uniform(-NOISE, NOISE)))
    assert len(tokens) == pytest.approx(length, abs=1 + length // 100)
    assert set(tokens[:-1]) <= {REPEATED}


def line(*, joined: int, tokens: int, **more: object) -> dict[str, object]:
    promises = {f"r{number}": 1 for number in range(joined)}
    return {"promises": promises, "context": tokens - 1, "prefill": 1, "decode": 3, "ms": 2.0, **more}


def test_iterations_count_after_the_first_quarter_has_joined_and_before_the_last_one_has() -> None:
    lines = [
        line(joined=TAUGHT + 24, tokens=1000, moved=5),
        line(joined=TAUGHT + 25, tokens=10, parks=[{"request": "r1"}]),
        line(joined=TAUGHT + 99, tokens=20),
        line(joined=TAUGHT + 100, tokens=1000, moved=2),
    ]
    held = held_in(lines, TAUGHT + 100, 0.25)
    assert (held.tokens, held.sequences, held.moved) == (15, 3, 7)
    assert held.parked == pytest.approx(1 / (TAUGHT + 100))
