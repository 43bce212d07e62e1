"""What a request is promised, in pages: one rule for the scheduler, the supervisor and the runner. Pure arithmetic.

A promise begins as prompt + expected output, doubles when the output outgrows it (S3-13), and never exceeds what the
request can use in its longest life. That life has an entry of KV for every token but the last: an entry is written when
a token is fed back to bring the next one, and after the last there is no next.
"""

from motet.domain import PAGE_TOKENS, pages_for


def max_kv_tokens(prompt_tokens: int, max_tokens: int, *, context_tokens: int = 0) -> int:
    """Entries of KV at the end of the longest answer. `max_tokens` is of output, delivered ones included; 0: nobody
    said, so the context (0: not known, and not needed) is the bound."""
    length = prompt_tokens + max_tokens if max_tokens else max(context_tokens, prompt_tokens + 1)
    return (min(length, context_tokens) if context_tokens else length) - 1


def max_pages(prompt_tokens: int, max_tokens: int, *, context_tokens: int = 0, page_tokens: int = PAGE_TOKENS) -> int:
    """Pages that hold the longest life: no promise is larger."""
    return max(1, pages_for(max_kv_tokens(prompt_tokens, max_tokens, context_tokens=context_tokens), page_tokens))


def initial_pages(
    prompt_tokens: int,
    max_tokens: int,
    *,
    delivered: int = 0,
    expected: int = 0,
    context_tokens: int = 0,
    page_tokens: int = PAGE_TOKENS,
) -> int:
    """Of the first promise: prompt, what is delivered, and what is still expected.

    `expected` is the quantile of the whole output that the pool promises; 0: nobody guessed, and `max_tokens` is
    expected. A request that has outlived its estimate is expected to go on for another page, and doubles from there.
    """
    remaining = max((expected or max_tokens) - delivered, page_tokens)
    most = max_pages(prompt_tokens, max_tokens, context_tokens=context_tokens, page_tokens=page_tokens)
    return min(max(1, pages_for(prompt_tokens + delivered + remaining, page_tokens)), most)


def doubled_pages(pages: int, most: int) -> int:
    """The next promise (S3-13). Never less than the present one, whatever was promised by mistake."""
    return max(pages, min(2 * pages, most))


def is_near_promise(tokens: int, pages: int, most: int, *, page_tokens: int = PAGE_TOKENS) -> bool:
    """Whether a sequence of so many tokens stands in the last promised page, or beyond, and could need more (S3-10)."""
    return pages < most and pages_for(tokens, page_tokens) >= pages
