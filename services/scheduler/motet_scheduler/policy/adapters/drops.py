"""Adapters that runners drop: no name points to their digest, and no request uses it."""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

from motet.domain import BASE, Digest
from motet_scheduler.policy.adapters.adapters import Adapters
from motet_scheduler.policy.effects import DropAdapter, ForgetManifest
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import AdapterRef

MAX_DROPPED = 64
"""Of the digests that serve no longer, with one event"""
NOBODY = AdapterRef("", "")


class AdapterDrops:
    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self.more = False
        """Whether the next event may drop more of the same."""

    def orders(
        self, is_in_use: Callable[[Digest], bool], runners: Collection[Runner]
    ) -> Iterator[DropAdapter | ForgetManifest]:
        """Drop digests that no name points to and no request uses, and what is kept for manifests that have gone. Each
        event asks: of many digests that stay in use, it looks at some."""
        retired = self._adapters.retired
        looked_at = [*islice(retired, MAX_DROPPED)]
        unused = [digest for digest in looked_at if not is_in_use(digest)]
        if len(retired) > MAX_DROPPED:
            for digest in looked_at:
                retired[digest] = retired.pop(digest)  # the next event looks at the others
        if unused or self._adapters.gone:
            yield from self._drop(unused, runners)
        self.more = bool(unused and retired)

    def _drop(self, unused: Iterable[Digest], runners: Collection[Runner]) -> Iterator[DropAdapter | ForgetManifest]:
        attached = [runner for runner in runners if runner.attached]
        refusing = [runner for runner in runners if runner.refused.failures]
        for digest in unused:
            sources = self._adapters.drop(digest)
            for name in sources:
                if name not in self._adapters.serving_sources().get(digest, ()):
                    for runner in refusing:
                        runner.forget_refusal(digest, str(name))
            if self._adapters.source_of(digest) is not None:  # another name serves the same bytes
                continue
            # Runners keep the bytes of earlier revisions, but not of names that have gone.
            ref = next((one.ref for name, one in sources.items() if name in self._adapters.by_name), NOBODY)
            for runner in attached:
                runner.adapters.forget_loads_of(digest)
                yield DropAdapter(runner.instance, digest, ref)
        for ref in self._adapters.gone:
            yield from (ForgetManifest(runner.instance, ref) for runner in attached)
        self._adapters.gone.clear()

    def unneeded_on(self, runner: Runner, is_in_use: Callable[[Digest], bool]) -> Iterator[DropAdapter]:
        """Drop adapters in a runner's memory that nothing needs: the runner was away when they were dropped."""
        needed = self._adapters.serving_sources()
        unknown = [
            digest
            for digest in runner.adapters.in_memory
            if digest not in needed and digest not in self._adapters.retired and digest != BASE
        ]
        if unknown and not self._adapters.undecided():
            yield from (DropAdapter(runner.instance, one, NOBODY) for one in unknown if not is_in_use(one))
