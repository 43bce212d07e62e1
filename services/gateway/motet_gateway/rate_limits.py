"""The headers that say what is left of a rate, as OpenAI's clients know them. Pure."""

from collections.abc import Iterable
from math import ceil

from motet.api.v1 import scheduler_pb2
from motet.quotas import full_in


def headers(accounts: Iterable[scheduler_pb2.AccountLevel]) -> dict[str, str]:
    """Of the account that has least left of its limit, for requests and for tokens; none where nothing is limited."""
    requests = [(one.requests, one.requests_per_minute) for one in accounts if one.requests_per_minute]
    tokens = [(one.tokens, one.tokens_per_minute) for one in accounts if one.tokens_per_minute]
    return _headers("requests", requests) | _headers("tokens", tokens)


def _headers(of: str, rates: list[tuple[float, int]]) -> dict[str, str]:
    if not rates:
        return {}
    left, limit = min(rates, key=lambda rate: rate[0] / rate[1])
    return {
        f"x-ratelimit-limit-{of}": str(limit),
        f"x-ratelimit-remaining-{of}": str(max(0, int(left))),
        f"x-ratelimit-reset-{of}": duration(full_in(left, limit)),
    }


def duration(seconds: float) -> str:
    """Such as 120ms, 6s or 1m0s."""
    if seconds < 1:
        return f"{ceil(max(0.0, seconds) * 1000)}ms"
    minutes, rest = divmod(ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
