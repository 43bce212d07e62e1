"""For which prompt tokens an iteration gives log probabilities (`prompt_logprobs`).

The logits of a token tell how likely the next one was. So a prompt's first token has no log probability, and the logits
of its last token belong to the answer. Cached tokens have no logits: a prompt shares only the pages before the first
token whose logits are still wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from motet_runner.interface import Logprobs


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of consecutive tokens of a prompt"""

    first: int
    """The first token's place in the prompt"""
    logprobs: Sequence[Logprobs]
    finite: bool = True
    """True if all logits are finite"""


def first_to_score(asked: int | None, *, scored: int, prompt_tokens: int) -> int:
    """The place of the first token whose log probability is wanted; `prompt_tokens`, beyond the last one, if none is.

    `asked`: how many alternatives per token; None: no log probabilities. `scored`: how many the client already has.
    """
    return prompt_tokens if asked is None else min(max(1, scored), prompt_tokens)


def places_to_score(start: int, count: int, *, first: int, prompt_tokens: int) -> range:
    """The places of the prompt's tokens that are scored by the logits of the tokens [start, start + count)."""
    return range(max(start + 1, first), min(start + count + 1, prompt_tokens))


def pages_before(first: int, page_tokens: int) -> int:
    """How many full pages have only tokens whose logits are not needed to score the token at `first`."""
    return (first - 1) // page_tokens
