"""Promises that do not keep pages from others: a sequence may join if the forecast of the largest need has room.

What a sequence is promised still says when it asks for more (S3-10). But a promise may always grow, and the sum of all
promises has no limit. If the forecast was wrong and pages are short, the newest sequence is parked (PU-15).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from motet.domain import RequestId
from motet.ledger import Shortfall
from motet_runner.plan.forecast import Need, Outlook, Prospect, pages_of_longest_lives
from motet_runner.plan.page_ledger import PageLedger
from motet_runner.plan.pages import PageAllocator
from motet_runner.plan.presets import UNBOUNDED
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.shared_pages import Payers


class ForecastLedger(PageLedger):
    """Each sequence is charged what it has of the largest need. Scheduler and supervisor are told these charges, so
    that their sums are the forecast.

    Between two iterations, requests may come one after the other. So what was found out about the running sequences is
    kept until one of them changes, and each request costs only its own part.
    """

    by_forecast = True

    def __init__(
        self,
        pages: PageAllocator,
        pages_of_adapters: Callable[[], int],
        sequences: Iterable[Sequence],
        page_tokens: int,
    ) -> None:
        """`sequences`: all of the engine."""
        super().__init__(pages, pages_of_adapters)
        self._sequences = sequences
        self._page_tokens = page_tokens
        self._known = _Known(Outlook(page_tokens))

    def promise(self, key: RequestId, pages: int) -> Shortfall | None:
        if key in self:
            self.sequences_changed()
        self._write(key, pages)
        return None

    def release(self, key: RequestId) -> int:
        if key in self:
            self.sequences_changed()
        return super().release(key)

    def sequences_changed(self) -> None:
        if self._known.sequences:
            self._known = _Known(Outlook(self._page_tokens))

    def check(self) -> None:
        super().check()
        known = self._known
        assert known.sum_of_ends == sum(one.end_pages for one in known.sequences), known.sum_of_ends
        now = [one.prospect for one in known.sequences[: len(known.outlook.prospects)]]
        assert now == known.outlook.prospects, (now, known.outlook.prospects)
        if (payers := known.payers.get(False)) is not None:  # all of them
            assert payers.shared == self._payers(known.sequences, now).shared, payers.shared
        for one in self._sequences:
            several = [self._pages.has_several_holders(page) for page in one.pages]
            assert all(before >= after for before, after in pairwise(several)), (one.request, one.pages, several)

    @property
    def promised(self) -> int:
        return sum(self.charges(self._sequences).values())

    @property
    def free_to_extend(self) -> int:
        return UNBOUNDED

    def why_not(
        self,
        sequence: Sequence,
        pages: int,
        at_hand: int = 0,
        /,
        *,
        pages_of_adapters: int,
    ) -> str:
        others = self._running(self._sequences)
        if not others:
            return ""
        limit = self.limit_beside(pages_of_adapters)
        need = self._need_with(sequence, others, limit) if pages > at_hand else 0
        if need <= limit and sequence.is_spared:
            # Others make room for these, but they do not for each other: all of it must be there.
            limit = max(0, self.capacity - pages_of_adapters)
            spared = [one.longest_life for one in (*others, sequence) if one.is_spared]
            need = pages_of_longest_lives(spared, self._page_tokens)
        if need <= limit:
            return ""
        return f"{need} pages are expected to be needed with it, and {limit} can be given beside the adapters"

    @property
    def charges_all_whole(self) -> bool:
        return False

    def charges(self, sequences: Iterable[Sequence]) -> dict[RequestId, int]:
        running = self._running(sequences)
        of_each = self._need(self._outlook(running), running).of_each
        return dict(zip((one.request for one in running), of_each, strict=True))

    def _need_with(self, sequence: Sequence, others: list[Sequence], limit: int) -> int:
        """What they need with one more, or less than that if it is within the limit, or beyond it in any case."""
        known = self._known_of(others)
        if known.sum_of_ends + sequence.end_pages <= limit:  # mostly it is
            return 0
        prospect = sequence.prospect
        key = prospect.but_tokens, tuple(sequence.pages)
        tokens, need = known.declined.get(key, (0, 0))
        if tokens <= prospect.tokens and need > limit:
            return need
        need = self._need(self._outlook(others), [*others, sequence], prospect).pages
        if need > limit:
            known.declined[key] = prospect.tokens, need
        return need

    def _need(self, outlook: Outlook, sequences: list[Sequence], *also: Prospect) -> Need:
        """What they need together: by this one figure they join, and it is what they are charged. `also`: who is not in
        the outlook."""
        prospects = [*outlook.prospects, *also]
        sure = [at for at, one in enumerate(prospects) if one.surely_longest]
        of_sure = [prospects[at] for at in sure]
        shared = self._shared(sequences, prospects, len(also))
        if len(sure) == len(prospects):
            shared_by_sure = shared
        else:
            more = len(also) if also and also[-1].surely_longest else 0
            shared_by_sure = self._shared([sequences[at] for at in sure], of_sure, more, sure=True)
        at_least = pages_of_longest_lives(of_sure, self._page_tokens, shared_by_sure)
        return outlook.need(also, shared=shared, at_least=at_least)

    def _known_of(self, sequences: list[Sequence]) -> "_Known":
        known = self._known
        if known.sequences != sequences[: len(known.sequences)]:
            self._known = known = _Known(Outlook(self._page_tokens))
        come = sequences[len(known.sequences) :]
        if come:
            known.declined.clear()
            known.payers.clear()
            known.sequences += come
            known.sum_of_ends += sum([one.end_pages for one in come])
        return known

    def _outlook(self, sequences: list[Sequence]) -> Outlook:
        outlook = self._known_of(sequences).outlook
        outlook.add([one.prospect for one in sequences[len(outlook.prospects) :]])
        return outlook

    def _shared(
        self, sequences: list[Sequence], prospects: list[Prospect], more: int, *, sure: bool = False
    ) -> list[int] | None:
        """How many of each one's pages others pay for; None if no page is shared. `more`: how many of the last ones are
        not known yet. `sure`: they are those that surely become as long as they can."""
        if not self._pages.repeated:
            return None
        known = self._known.payers.get(sure)
        if known is None:
            known = self._known.payers[sure] = self._payers(sequences[: len(sequences) - more], prospects)
        if not more:
            return known.shared
        return known.shared_with(sequences[-1].pages, prospects[-1].likely_left, lambda at: prospects[at].likely_left)

    def _payers(self, sequences: list[Sequence], prospects: list[Prospect]) -> Payers:
        pages = [one.pages for one in sequences]
        return Payers(pages, lambda at: prospects[at].likely_left, self._pages.has_several_holders)

    def _running(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        return [one for one in sequences if one.request in self._promises]


@dataclass(slots=True)
class _Known:
    """About the running sequences, while none of them changes."""

    outlook: Outlook
    """Of the first ones: as many as there were when somebody asked what they need"""
    sequences: list[Sequence] = field(default_factory=list)
    sum_of_ends: int = 0
    """The pages of all of them, each at its own end"""
    payers: dict[bool, Payers] = field(default_factory=dict)
    """Of all, and of those that surely become as long as they can"""
    declined: dict[tuple[tuple[float, ...], tuple[int, ...]], tuple[int, int]] = field(default_factory=dict)
    """The tokens of those that were declined beside them, and the need with each, by what else decides about it, with
    the pages that it found in the prefix cache. With more tokens, and all else equal, the need is never smaller."""
