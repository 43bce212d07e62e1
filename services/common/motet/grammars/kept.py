"""Keeps compiled grammars, so that only the first request of a tenant with one waits for its compilation: a copy takes
some hundredths of a millisecond."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher

from motet.grammars.compiler import GrammarMask, Grammars
from motet.grammars.grammar import Grammar

MAX_OF_TENANT = 64
"""Grammars"""
MAX_BYTES = 64 << 20
"""Of all tenants, as estimated"""
MAX_SHARE = 8
"""One that takes more than the whole divided by this is not kept."""
BYTES_A_SECOND = 128 << 20
"""llguidance does not say what a compiled grammar takes, but what it has written took time: at most 114 KB a
millisecond of CPU time, for schemas, choices and repetitions of 1 to 100 KB."""


@dataclass(slots=True)
class _OfTenant:
    """The one that was used last is at the end."""

    matchers: OrderedDict[Grammar, tuple[LLMatcher, int]] = field(default_factory=OrderedDict)
    size: int = 0

    def drop_oldest(self) -> int:
        _, (_, size) = self.matchers.popitem(last=False)
        self.size -= size
        return size


class KeptGrammars:
    """Each tenant has its own: how soon an answer begins betrays no other tenant's grammar. Not to be used by two
    threads at once."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._of_tenants: dict[str, _OfTenant] = {}
        self._size = 0

    def mask(self, grammar: Grammar, delivered: Sequence[int], *, tenant: str) -> GrammarMask:
        """See `Grammars.mask`."""
        own = self._of_tenants.get(tenant)
        if own is not None and (found := own.matchers.get(grammar)) is not None:
            own.matchers.move_to_end(grammar)
            matcher, _ = found
        else:
            began = time.thread_time()
            matcher = self._grammars.compiled(grammar)
            size = len(grammar.text) + int((time.thread_time() - began) * BYTES_A_SECOND)
            self._keep(tenant, grammar, matcher, size)
        return self._grammars.started(matcher.deep_copy(), delivered)

    def _keep(self, tenant: str, grammar: Grammar, matcher: LLMatcher, size: int) -> None:
        if size > MAX_BYTES // MAX_SHARE:
            return
        own = self._of_tenants.setdefault(tenant, _OfTenant())
        own.matchers[grammar] = matcher, size
        own.size += size
        self._size += size
        if len(own.matchers) > MAX_OF_TENANT:
            self._size -= own.drop_oldest()
        while self._size > MAX_BYTES:
            most = max(self._of_tenants, key=lambda one: self._of_tenants[one].size)
            self._size -= self._of_tenants[most].drop_oldest()
            if not self._of_tenants[most].matchers:
                del self._of_tenants[most]
