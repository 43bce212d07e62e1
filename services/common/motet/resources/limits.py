"""Limits of use: what the platform team grants to a namespace, and what a tenant allows one adapter."""

from typing import Annotated

from pydantic import Field

from motet.resources.fields import ResourceModel

MAX_REQUESTS_PER_MINUTE = 10_000_000
MAX_TOKENS_PER_MINUTE = 1_000_000_000_000
MAX_CONCURRENCY = 1_000_000


class Limits(ResourceModel):
    """What may be used at most."""

    requests_per_minute: Annotated[int, Field(ge=1, le=MAX_REQUESTS_PER_MINUTE)] | None = None
    """How many requests may come in a minute, ten seconds of it at once. More are refused with status 429, or wait if
    their class is `Batch`."""

    tokens_per_minute: Annotated[int, Field(ge=1, le=MAX_TOKENS_PER_MINUTE)] | None = None
    """How many tokens prompts and answers may have in a minute, ten seconds of it at once. A request counts with its
    estimated answer, and is corrected at its end."""

    concurrency: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)] | None = None
    """How many requests may run at once. More wait."""

    @property
    def limited(self) -> bool:
        return any((self.requests_per_minute, self.tokens_per_minute, self.concurrency))
