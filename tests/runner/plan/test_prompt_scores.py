"""The log probabilities of prompts: each token's comes once, whatever is computed beside it or computed again."""

import pytest

from motet.domain import ParkMethod, RequestId
from motet_runner.interface import Finish, State
from tests.runner.plan.fake_device import FakeDevice, make_planner, new

R = RequestId
PROMPT = 40


def test_scores_come_in_pieces_beside_prompts_that_are_not_scored() -> None:
    planner = make_planner(chunk_tokens=12)
    device = FakeDevice(planner)
    planner.commands.add(new("scored", prompt=PROMPT, prompt_logprobs=0))
    planner.commands.add(new("other"))
    device.run()
    assert device.scored == {"scored": list(range(1, PROMPT)), "other": []}
    for request in ("scored", "other"):
        tokens, finish = device.finished[request]
        assert (len(tokens), finish) == (10, Finish.LENGTH)


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_prompt_that_is_computed_again_after_a_park_is_scored_once(ahead) -> None:
    planner = make_planner(chunk_tokens=12)
    device = FakeDevice(planner, ahead=ahead)
    planner.commands.add(new("a", prompt=PROMPT, prompt_logprobs=0))
    for _ in range(2):
        device.step()
    assert device.scored == {"a": list(range(1, 25))}
    sequence = planner.sequences.get(R("a"))
    assert planner.commands.park(R("a"), 1, sequence.promise, sequence.promise, ParkMethod.RECOMPUTE)
    assert sequence.state is State.PARKED
    device.run()
    assert device.computed["a"] > PROMPT + 10, "nothing was computed again"
    assert device.scored == {"a": list(range(1, PROMPT))}
    assert len(device.finished["a"][0]) == 10


def test_a_prompt_whose_scores_are_not_finite_ends_before_its_first_token() -> None:
    planner = make_planner(chunk_tokens=12)
    device = FakeDevice(planner)
    device.not_finite.add("a")
    planner.commands.add(new("a", prompt=PROMPT, prompt_logprobs=0))
    planner.commands.add(new("b", prompt=PROMPT, prompt_logprobs=0))
    device.run()
    assert device.given_up == ["a"]
    assert "a" not in device.scored
    assert device.scored["b"] == list(range(1, PROMPT))
