"""The prefix cache: full pages whose keys and values later sequences may reuse.

Keys and values depend on the base model, on the adapter and on all tokens before (C11). So a page is found only by its
adapter and its digest (`motet.prefix_hints`), which covers a salt, its tokens and all pages before it.

The cache holds pages like a sequence does, but it yields them: see PageAllocator. It needs no list of children to evict
a page later than the pages that follow it: a holder of a cached page also holds all pages before it, and gives them
back later. `insert` ensures that.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from motet.domain import Digest
from motet.prefix_hints import MAX_PROMPT_HINTS, hint_of, page_digest, pages_with_hints
from motet_runner.plan.pages import PageAllocator

_Key = tuple[Digest, bytes]


@dataclass(slots=True, eq=False)
class PageChain:
    """The digests of the full pages of one sequence. Each is computed once, on demand."""

    adapter: Digest
    salt: bytes
    page_tokens: int
    digests: list[bytes] = field(default_factory=list)
    cached: int = 0
    """How many of the sequence's first pages are in the cache."""

    def extend(self, tokens: Sequence[int], pages: int) -> None:
        """Compute the digests of the first `pages` pages of `tokens`, where missing."""
        digests, size = self.digests, self.page_tokens
        for start in range(len(digests) * size, pages * size, size):
            previous = digests[-1] if digests else self.salt
            digests.append(page_digest(previous, tokens[start : start + size]))

    def pages_in_common(self, other: "PageChain") -> int:
        """How many first pages have equal digests in both."""
        if (self.adapter, self.salt) != (other.adapter, other.salt):
            return 0
        low, high = 0, min(len(self.digests), len(other.digests))
        while low < high:  # a digest covers all pages before it
            middle = (low + high + 1) // 2
            if self.digests[middle - 1] == other.digests[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def may_find_pages_of(self, other: "PageChain") -> bool:
        """False if the first page that it has not found in the cache is surely not one that the other sequence adds."""
        if self.salt != other.salt or self.adapter != other.adapter:
            return False
        mine, others = self.digests[self.cached : self.cached + 1], other.digests[self.cached : self.cached + 1]
        return not mine or not others or mine == others


@dataclass(slots=True, eq=False)
class _Entry:
    key: _Key
    page: int
    index: int
    """How many pages come before it in its sequence."""
    previous: _Key | None
    """The previous page's key. Only `check` needs it."""


class PrefixCache:
    """Every call costs a few dictionary look-ups per page that it returns or adds."""

    def __init__(self, pages: PageAllocator, page_tokens: int) -> None:
        self._pages = pages
        self._page_tokens = page_tokens
        self._with_hints = pages_with_hints(page_tokens)
        self._by_key: dict[_Key, _Entry] = {}
        self._by_page: dict[int, _Entry] = {}
        self.queried_tokens = 0
        """The number of all tokens of sequences that have started."""
        self.hit_tokens = 0
        """How many of these tokens were in the cache."""
        self.evicted_pages = 0
        """How many pages the cache had to yield."""
        pages.on_cache_page_taken = self._on_page_taken

    def __len__(self) -> int:
        """How many pages are in the cache."""
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def match(self, chain: PageChain, tokens: Sequence[int], *, first: int = 0, last: int | None = None) -> list[int]:
        """The cached pages of a sequence from page `first` on, without a gap; at most up to page `last`, and never the
        page of its newest token, because at least one token must be computed. Changes nothing.
        """
        end = (len(tokens) - 1) // self._page_tokens
        end = end if last is None else min(end, last)
        found: list[int] = []
        for index in range(first, end):
            chain.extend(tokens, index + 1)
            entry = self._by_key.get((chain.adapter, chain.digests[index]))
            if entry is None:
                break
            found.append(entry.page)
        return found

    def attach(self, chain: PageChain, tokens: Sequence[int], pages: list[int], *, last: int | None = None) -> int:
        """Let a sequence share the cached pages that follow `pages`, which must all be cached, and append them. Returns
        how many were added."""
        assert chain.cached == len(pages), f"{len(pages)} pages are held, {chain.cached} of them are cached"
        found = self.match(chain, tokens, first=len(pages), last=last)
        self._pages.share(found)
        pages += found
        chain.cached = len(pages)
        return len(found)

    def insert(self, chain: PageChain, tokens: Sequence[int], pages: Sequence[int], full: int) -> None:
        """Add the first `full` pages of a sequence, which it holds and has computed to the end.

        If the digest of a page is already in the cache, the new page replaces the cached page, unless a sequence uses
        the cached one. Then the pages after it are not added for now: the sequence holds no cached page before them.
        """
        chain.extend(tokens, full)
        for index in range(chain.cached, full):
            page, key = pages[index], (chain.adapter, chain.digests[index])
            entry = self._by_key.get(key)
            if entry is None:
                entry = _Entry(key, page, index, (chain.adapter, chain.digests[index - 1]) if index else None)
                self._by_key[key] = entry
            elif entry.page != page:
                if not self._pages.only_cached(entry.page):
                    return
                self._pages.uncache(entry.page)
                del self._by_page[entry.page]
                entry.page = page
            else:
                raise AssertionError(f"page {page} is in the cache already, and its sequence does not know")
            self._pages.cache(page)
            self._by_page[page] = entry
            chain.cached = index + 1

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Pages were moved: old page → new page. Some of them may not be in the cache."""
        moved = {moves[page]: self._by_page.pop(page) for page in moves if page in self._by_page}
        for page, entry in moved.items():
            entry.page = page
        self._by_page |= moved

    def hints(self, chains: Iterable[PageChain], count: int) -> list[int]:
        """The hints of at most `count` pages: first the pages that the sequences of `chains` use, then the pages that
        will stay longest. Only a prompt's first pages have hints. The search is bounded, so that a report of a large
        cache takes no longer than one of a small cache."""
        digests: dict[bytes, None] = {}
        for chain in chains:
            digests |= dict.fromkeys(chain.digests[: min(chain.cached, self._with_hints)])
        for page in islice(self._pages.most_valuable_cached(), MAX_PROMPT_HINTS * count):
            if len(digests) >= count:
                break
            entry = self._by_page[page]
            if entry.index < self._with_hints:
                digests[entry.key[1]] = None
        return [hint_of(digest) for digest in islice(digests, count)]

    @property
    def held(self) -> Collection[int]:
        return self._by_page.keys()

    def check(self) -> None:
        """Raises AssertionError if the cache disagrees with itself."""
        assert len(self._by_key) == len(self._by_page), (len(self._by_key), len(self._by_page))
        rank_of = {page: rank for rank, page in enumerate(self._pages.most_valuable_cached())}
        for page, entry in self._by_page.items():
            assert entry.page == page, f"page {page} is listed for the entry of page {entry.page}"
            assert self._by_key.get(entry.key) is entry, f"page {page} cannot be found"
            if entry.previous is None:
                continue
            previous = self._by_key.get(entry.previous)
            assert previous is not None, f"page {page} is in the cache, and the page before it is not"
            # A used page has no rank, and counts as evicted last.
            assert rank_of.get(previous.page, -1) <= rank_of.get(page, -1), (
                f"page {previous.page} would be evicted before page {page}, which comes after it"
            )

    def _on_page_taken(self, page: int) -> None:
        entry = self._by_page.pop(page)
        del self._by_key[entry.key]
        self.evicted_pages += 1
