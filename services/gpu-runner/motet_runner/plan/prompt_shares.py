"""Whose prompt comes next: tenants share the prompt tokens of iterations by their weights.

Each turn is of the tenant that has had the fewest tokens for its weight: its oldest prompt takes as much as the
iteration has left. So pieces stay large, and each tenant gets its share within one piece (start-time fair queueing):
many prompts of one do not delay another's. Within a tenant it is first come, first served (OR-07).

A tenant that has had less than its share is owed some of it when it comes back: its prompt then goes before those of a
busy tenant, as if it were alone. Who is new is owed as much. Pure.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heapreplace

from motet_runner.plan.sequence import Sequence

MAX_OWED = 2048
"""Tokens that a tenant may be owed."""

MAX_REMEMBERED = 1024
"""Tenants; the one that had tokens longest ago is forgotten first. It is owed as much as a new one then."""

_TOKEN = 1 << 29
"""In whole parts of it, so that many tokens at once count as much as one after the other."""


class PromptShares:
    def __init__(self) -> None:
        self.had: dict[str, int] = {}
        """By tenant: parts of tokens, divided by its weight. The tenant of the last turn comes last."""
        self._now = 0
        """What the tenant had had before it whose turn came last, or one before: it never falls."""

    def in_turn(self, prompts: list[Sequence]) -> Iterable[Sequence]:
        """In which order they take tokens, each as many as it can. They are given by arrival; the same list, if they
        are all of one tenant."""
        tenant = prompts[0].tenant if prompts else ""
        for prompt in prompts:
            if prompt.tenant != tenant:
                return self._turns(prompts)
        return prompts

    def charge(self, prompt: Sequence, tokens: int) -> None:
        """An iteration computes these, in the order of its turns."""
        had = self._had_by(prompt)
        self._now = max(self._now, had)
        self.had.pop(prompt.tenant, None)
        self.had[prompt.tenant] = had + tokens * _price(prompt)
        if len(self.had) > MAX_REMEMBERED:
            del self.had[next(iter(self.had))]

    def _had_by(self, prompt: Sequence) -> int:
        least = self._now - MAX_OWED * _price(prompt)
        return max(least, self.had.get(prompt.tenant, least))

    def _turns(self, prompts: list[Sequence]) -> Iterator[Sequence]:
        by_tenant: dict[str, list[Sequence]] = {}
        for prompt in prompts:
            by_tenant.setdefault(prompt.tenant, []).append(prompt)
        turns = []
        for own in by_tenant.values():
            rest = iter(own)
            prompt = next(rest)
            turns.append((self._had_by(prompt), prompt.arrival, prompt, rest))
        heapify(turns)
        while turns:
            had, _, prompt, rest = turns[0]
            yield prompt
            following = next(rest, None)
            if following is None:
                heappop(turns)
            else:
                had += min(prompt.to_schedule, prompt.room) * _price(prompt)
                heapreplace(turns, (had, following.arrival, following, rest))


def _price(prompt: Sequence) -> int:
    return _TOKEN // prompt.new.weight
