"""Which tokens of a prompt an iteration tells the log probability of (`prompt_logprobs`).

The logits of a token tell how likely the next one was. So a prompt's first token has no log probability, and the
logits of its last token belong to the answer. What the prefix cache has brings no logits: a prompt shares only the
pages before the first token whose logits are still wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from motet.domain import PAGE_TOKENS
from motet_runner.interface import Logprobs


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of tokens of a prompt that follow each other."""

    first: int
    """The place of the first one in the prompt"""
    logprobs: Sequence[Logprobs]
    finite: bool = True
    """Whether all logits are numbers"""


def first_to_score(asked: int | None, *, scored: int, prompt_tokens: int) -> int:
    """The place of the first token whose log probability is wanted; `prompt_tokens`, beyond the last one, if none is.

    `asked`: how many alternatives of each; None: no log probabilities. `scored`: tokens that the client has them of.
    """
    return prompt_tokens if asked is None else min(max(1, scored), prompt_tokens)


def places_to_score(start: int, count: int, *, first: int, prompt_tokens: int) -> range:
    """The places of the prompt's tokens that the logits of the tokens [start, start + count) tell about."""
    return range(max(start + 1, first), min(start + count + 1, prompt_tokens))


def pages_before(first: int) -> int:
    """Full pages of tokens whose logits are not needed to score the token at `first`."""
    return (first - 1) // PAGE_TOKENS
