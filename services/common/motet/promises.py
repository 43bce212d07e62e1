"""How many pages a request is promised. Scheduler, supervisor and runner use this one rule. Pure arithmetic.

A promise begins as prompt + expected output. It doubles when the output needs more (S3-13). It never exceeds what the
longest possible answer needs. That is keys and values for every token but the last: the engine computes those of a
token in order to get the next token, and after the last token no other follows.
"""

from enum import StrEnum
from typing import Literal, Self, assert_never, get_args

from motet.domain import pages_for

BUCKETS = 10
"""Into how many equal parts of the context S3 divides the lengths of answers (S3-03)."""

PromiseQuantile = Literal[50, 80, 90, 95]
"""Which quantiles of an estimate a promise can cover, in percent: those that an estimate has, in the same order."""

PROMISE_QUANTILES: tuple[int, ...] = get_args(PromiseQuantile)

USUAL_PROMISE_QUANTILE: PromiseQuantile = 80

LENGTH_OF_MAX_TOKENS = "max_tokens"
"""The source of an estimate that nobody learned from answers: each quantile is the client's `max_tokens`."""

_MOST_TOKENS = 2**32 - 1
"""That the field of the message can hold."""


class PromiseRule(StrEnum):
    """What the first promise of a request covers. The published systems differ in this."""

    CONTEXT = "context"
    """The longest answer that the model allows: FasterTransformer, and what S3 calls ORCA."""

    MAX_TOKENS = "max tokens"
    """The prompt and the client's `max_tokens`: Orca (OR-09)."""

    BUCKET = "bucket"
    """The prompt and the upper edge of the bucket in which the output is expected to end: S3 (S3-04)."""

    EXPECTED = "expected"
    """The prompt and the expected output: a quantile of the estimate, or the true length for an oracle."""

    NEXT_PAGE = "next page"
    """The prompt and one more page: Punica."""

    @classmethod
    def from_proto(cls, value: str) -> Self:
        """The rule; EXPECTED for one that is absent, or of a newer runner that this version does not know."""
        return cls(value) if value in _RULES else cls(cls.EXPECTED)


_RULES = frozenset(PromiseRule)


def known_quantile(percent: int) -> int:
    """The quantile; the usual one for a number that is absent, or of a newer runner."""
    return percent if percent in PROMISE_QUANTILES else USUAL_PROMISE_QUANTILE


def tokens_of(pages: int, page_tokens: int) -> int:
    """How many tokens fit in the pages of a promise. Pages and their size may be any numbers that a peer has sent, and
    what we send of them must still be a message."""
    return min(pages * page_tokens, _MOST_TOKENS)


def max_kv_tokens(prompt_tokens: int, max_tokens: int, *, context_tokens: int = 0) -> int:
    """How many tokens have keys and values at the end of the longest answer.

    `max_tokens` counts output tokens, with the delivered ones; 0: not given, so the context is the limit.
    `context_tokens` is 0 where the caller does not know it and needs no limit by it.
    """
    length = prompt_tokens + max_tokens if max_tokens else max(context_tokens, prompt_tokens + 1)
    return (min(length, context_tokens) if context_tokens else length) - 1


def max_pages(prompt_tokens: int, max_tokens: int, *, page_tokens: int, context_tokens: int = 0) -> int:
    """Pages for the longest answer. No promise is larger."""
    return max(1, pages_for(max_kv_tokens(prompt_tokens, max_tokens, context_tokens=context_tokens), page_tokens))


def initial_pages(
    prompt_tokens: int,
    max_tokens: int,
    *,
    page_tokens: int,
    delivered: int = 0,
    expected: int = 0,
    context_tokens: int = 0,
) -> int:
    """Pages of the first promise: for the prompt, the delivered tokens, and the output that is still expected.

    `expected` is the expected length of the whole output, at the quantile that the pool promises. 0: there is no
    estimate, and `max_tokens` is expected. A request that is already longer than its estimate is promised one more
    page, and its promise doubles from there.
    """
    remaining = max((expected or max_tokens) - delivered, page_tokens)
    most = max_pages(prompt_tokens, max_tokens, context_tokens=context_tokens, page_tokens=page_tokens)
    return min(max(1, pages_for(prompt_tokens + delivered + remaining, page_tokens)), most)


def bucket_edge(tokens: int, *, context_tokens: int, buckets: int = BUCKETS) -> int:
    """The largest number of output tokens in the bucket of `tokens` (S3-04). Buckets are equal parts of the context."""
    width = max(1, -(-context_tokens // buckets))
    return -(-max(tokens, 1) // width) * width


def pages_by_rule(
    rule: PromiseRule,
    prompt_tokens: int,
    max_tokens: int,
    *,
    page_tokens: int,
    context_tokens: int,
    delivered: int = 0,
    expected: int = 0,
) -> int:
    """Pages of the first promise by the rule of a preset.

    Without an estimate (`expected` is 0), the rules that need one expect `max_tokens`, as `initial_pages` does.
    """
    match rule:
        case PromiseRule.CONTEXT:
            return max_pages(prompt_tokens, 0, context_tokens=context_tokens, page_tokens=page_tokens)
        case PromiseRule.MAX_TOKENS:
            return max_pages(prompt_tokens, max_tokens, context_tokens=context_tokens, page_tokens=page_tokens)
        case PromiseRule.BUCKET:
            expected = bucket_edge(expected, context_tokens=context_tokens) if expected else 0
        case PromiseRule.NEXT_PAGE:
            expected = delivered + page_tokens
        case PromiseRule.EXPECTED:
            pass
        case _:
            assert_never(rule)
    return initial_pages(
        prompt_tokens,
        max_tokens,
        delivered=delivered,
        expected=expected,
        context_tokens=context_tokens,
        page_tokens=page_tokens,
    )


def doubled_pages(pages: int, most: int) -> int:
    """The next promise (S3-13). It is never smaller than the present one, even if that one exceeds `most`."""
    return max(pages, min(2 * pages, most))


def is_near_promise(tokens: int, pages: int, *, page_tokens: int) -> bool:
    """Whether a sequence of `tokens` tokens has reached its last promised page (S3-10). If it can ever need more, it
    needs an answer soon."""
    return pages_for(tokens, page_tokens) >= pages
