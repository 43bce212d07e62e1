"""The prefix cache: who may share a page, and which page goes first."""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motet.domain import BASE, PAGE_TOKENS, Digest, pages_for
from motet.prefix_hints import MAX_PROMPT_HINTS, block_digests, hint_of, page_digest, prefix_salt, prompt_hints
from motet_runner.plan import prefix_cache
from motet_runner.plan.pages import PageAllocator
from motet_runner.plan.prefix_cache import PageChain, PrefixCache

SALT = prefix_salt(Digest("sha256:base"), BASE, "acme")


def chain(adapter: Digest = BASE, salt: bytes = SALT) -> PageChain:
    return PageChain(adapter, salt, PAGE_TOKENS)


def tokens_of(pages: str, more: int = 1) -> list[int]:
    """A page of equal tokens for each letter, and some tokens that do not fill a page."""
    return [ord(letter) for letter in pages for _ in range(PAGE_TOKENS)] + [7] * more


def compute(cache: PrefixCache, pages: PageAllocator, tokens: list[int], own: PageChain | None = None) -> list[int]:
    """A sequence shares what it can, computes the rest, and adds it to the cache. It still holds its pages."""
    own = own or chain()
    held: list[int] = []
    cache.attach(own, tokens, held)
    held += pages.take(pages_for(len(tokens), PAGE_TOKENS) - len(held)) or []
    cache.insert(own, tokens, held, len(tokens) // PAGE_TOKENS)
    return held


def found(cache: PrefixCache, pages: str, adapter: Digest = BASE, salt: bytes = SALT) -> int:
    return len(cache.match(chain(adapter, salt), tokens_of(pages)))


@pytest.fixture
def pages() -> PageAllocator:
    return PageAllocator(8)


@pytest.fixture
def cache(pages: PageAllocator) -> PrefixCache:
    return PrefixCache(pages, PAGE_TOKENS)


def test_a_sequence_finds_the_full_pages_of_its_longest_cached_prefix(cache, pages) -> None:
    held = compute(cache, pages, tokens_of("abc"))
    assert cache.match(chain(), tokens_of("abx")) == held[:2]
    assert cache.match(chain(), tokens_of("abcd")) == held[:3]
    assert cache.match(chain(), tokens_of("bc")) == []


def test_one_token_is_always_computed(cache, pages) -> None:
    compute(cache, pages, tokens_of("abc"))
    assert found(cache, "ab") == 2
    assert len(cache.match(chain(), tokens_of("ab", more=0))) == 1


def test_cached_pages_that_no_sequence_uses_count_as_free_and_are_handed_out(cache, pages) -> None:
    held = compute(cache, pages, tokens_of("abc"))
    assert (pages.free, len(cache)) == (4, 3)
    pages.give(held)
    assert (pages.free, len(cache)) == (8, 3)
    assert len(pages.take(8) or []) == 8
    assert (pages.free, len(cache), cache.evicted_pages) == (0, 0, 3)


def test_a_page_that_a_sequence_uses_is_not_evicted(cache, pages) -> None:
    pages.give(compute(cache, pages, tokens_of("abc")))
    held: list[int] = []
    cache.attach(chain(), tokens_of("ab"), held)
    assert pages.take(7) is None
    pages.take(6)
    assert found(cache, "ab") == 2
    assert found(cache, "abc") == 2


def test_the_least_recently_used_page_goes_first_and_a_page_never_before_the_page_after_it(cache, pages) -> None:
    pages.give(compute(cache, pages, tokens_of("abc")))
    pages.give(compute(cache, pages, tokens_of("xy")))
    pages.give(compute(cache, pages, tokens_of("ab")))  # used again: c is older now than x and y
    left = []
    for _ in range(5):
        left.append((found(cache, "abc"), found(cache, "xy")))
        pages.take(8 - len(cache) - (8 - pages.free) + 1)
    assert left == [(3, 2), (2, 2), (2, 1), (2, 0), (1, 0)]


@pytest.mark.parametrize(
    ("adapter", "salt"),
    [
        (Digest("sha256:x"), SALT),
        (BASE, prefix_salt(Digest("sha256:base"), BASE, "globex")),
        (BASE, prefix_salt(Digest("sha256:other"), BASE, "acme")),
    ],
)
def test_sequences_of_other_adapters_tenants_or_base_models_find_nothing(cache, pages, adapter, salt) -> None:
    compute(cache, pages, tokens_of("abc"))
    assert found(cache, "abc", adapter, salt) == 0


def test_pages_with_equal_hints_are_not_confused(cache, pages, monkeypatch) -> None:
    monkeypatch.setattr(prefix_cache, "page_digest", lambda *given: b"8 bytes." + page_digest(*given)[8:])
    compute(cache, pages, tokens_of("abc"))
    mine, other = chain(), chain()
    mine.extend(tokens_of("abc"), 3)
    other.extend(tokens_of("xyz"), 3)
    assert list(map(hint_of, mine.digests)) == list(map(hint_of, other.digests))
    assert (found(cache, "abc"), found(cache, "xyz")) == (3, 0)


def test_two_sequences_that_computed_the_same_keep_their_own_pages(cache, pages) -> None:
    first, second = chain(), chain()
    pages_of_first, pages_of_second = pages.take(3) or [], pages.take(3) or []
    cache.insert(first, tokens_of("ab"), pages_of_first, 2)
    cache.insert(second, tokens_of("ab"), pages_of_second, 2)
    assert cache.match(chain(), tokens_of("ab")) == pages_of_first[:2]
    assert second.cached == 0
    cache.check()


def test_pages_that_somebody_uses_take_the_place_of_equal_ones_that_nobody_uses(cache, pages) -> None:
    first, second = chain(), chain()
    pages_of_first, pages_of_second = pages.take(3) or [], pages.take(4) or []
    cache.insert(first, tokens_of("ab"), pages_of_first, 2)
    pages.give(pages_of_first)
    cache.insert(second, tokens_of("abc"), pages_of_second, 3)
    assert cache.match(chain(), tokens_of("abcd")) == pages_of_second[:3]
    pages.check([pages_of_second], cache.held)
    cache.check()


def test_pages_after_one_that_only_another_sequence_holds_are_not_added_yet(cache, pages) -> None:
    first, second = chain(), chain()
    pages_of_first, pages_of_second = pages.take(3) or [], pages.take(4) or []
    cache.insert(first, tokens_of("ab"), pages_of_first, 2)
    cache.insert(second, tokens_of("abc"), pages_of_second, 3)
    assert (len(cache), second.cached) == (2, 0)
    pages.give(pages_of_first)
    cache.insert(second, tokens_of("abc"), pages_of_second, 3)
    assert (len(cache), second.cached) == (3, 3)
    cache.check()


def test_each_digest_is_computed_once(cache, pages, monkeypatch) -> None:
    computed = []
    monkeypatch.setattr(prefix_cache, "page_digest", lambda *given: computed.append(given) or page_digest(*given))
    own, tokens = chain(), tokens_of("abc")
    for _ in range(3):
        cache.match(own, tokens)
    assert len(computed) == 1  # without the first page, there is no need to look for the second
    held = compute(cache, pages, tokens, own)
    cache.match(own, tokens)
    assert len(computed) == 3
    tokens += tokens_of("d", more=0)
    held += pages.take(1) or []
    cache.insert(own, tokens, held, 4)
    assert len(computed) == 4


@pytest.mark.parametrize(
    ("mine", "other", "common"), [("abc", "abc", 3), ("abc", "ab", 2), ("abc", "axc", 1), ("a", "b", 0)]
)
def test_the_pages_in_common_of_two_sequences(mine: str, other: str, common: int) -> None:
    first, second = chain(), chain()
    first.extend(tokens_of(mine), len(mine))
    second.extend(tokens_of(other), len(other))
    assert first.pages_in_common(second) == common
    assert first.pages_in_common(chain(Digest("sha256:x"))) == 0


@pytest.mark.parametrize(
    ("looks_for", "adds", "may_find"),
    [("abc", "axc", False), ("abc", "abx", True), ("ab", "abx", True), ("abc", "a", True), ("abc", "", True)],
)
def test_who_may_find_pages_that_another_sequence_adds(cache, pages, looks_for: str, adds: str, may_find: bool) -> None:
    compute(cache, pages, tokens_of("a"))
    waiting, adding = chain(), chain()
    cache.attach(waiting, tokens_of(looks_for), [])
    adding.extend(tokens_of(adds), len(adds))
    assert waiting.may_find_pages_of(adding) is may_find
    assert not waiting.may_find_pages_of(chain(Digest("sha256:x")))
    assert not waiting.may_find_pages_of(chain(salt=b"another"))


def hint(of: str) -> int:
    return hint_of(list(block_digests(SALT, tokens_of(of)))[-1])


def test_hints_name_used_pages_first_and_then_those_that_stay_longest(cache, pages) -> None:
    pages.give(compute(cache, pages, tokens_of("xy")))
    pages.give(compute(cache, pages, tokens_of("ab")))
    used, other = chain(), chain()
    compute(cache, pages, tokens_of("q"), used)
    other.extend(tokens_of("not computed"), 12)
    assert cache.hints([used, other], 9) == [hint("q"), hint("a"), hint("ab"), hint("x"), hint("xy")]
    assert cache.hints([used, used], 2) == [hint("q"), hint("a")]


def test_hints_name_no_page_that_prompts_have_no_hints_of() -> None:
    pages = PageAllocator(64)
    cache = PrefixCache(pages, PAGE_TOKENS)
    long, own = "abcdefghijklmnopqrstuvwxyz", chain()
    held = compute(cache, pages, tokens_of(long), own)
    first = [hint(long[:length]) for length in range(1, MAX_PROMPT_HINTS + 1)]
    assert cache.hints([own], 64) == first
    pages.give(held)
    assert cache.hints([], 64) == first


@pytest.mark.parametrize(("size", "hinted"), [(32, [1, 3, 5, 7, 9, 11, 13, 15]), (128, [7, 15]), (24, []), (512, [])])
def test_a_larger_page_has_the_hint_of_its_last_block_and_others_have_none(size: int, hinted: list[int]) -> None:
    """A gateway's hints are of blocks of 16 tokens, whatever a runner's pages are."""
    pages = PageAllocator(64)
    cache = PrefixCache(pages, size)
    tokens = list(range(600))
    own = PageChain(BASE, SALT, size)
    held = pages.take(pages_for(len(tokens), size)) or []
    cache.insert(own, tokens, held, len(tokens) // size)
    of_prompt = prompt_hints(SALT, tokens)
    assert cache.hints([own], 64) == [of_prompt[block] for block in hinted]
    pages.give(held)
    assert cache.hints([], 64) == [of_prompt[block] for block in hinted]


@pytest.mark.parametrize("size", [24, 32, 128])
def test_pages_of_any_size_are_found(size: int) -> None:
    pages = PageAllocator(64)
    cache = PrefixCache(pages, size)
    tokens = list(range(600))
    held = pages.take(pages_for(len(tokens), size)) or []
    cache.insert(PageChain(BASE, SALT, size), tokens, held, len(tokens) // size)
    full = len(tokens) // size
    assert cache.match(PageChain(BASE, SALT, size), [*tokens, 1]) == held[:full]
    assert cache.match(PageChain(BASE, SALT, size), tokens[: 2 * size]) == held[:1], "one token must be computed"
    assert cache.match(PageChain(BASE, SALT, size), [*tokens[: size + 1], *[9] * size]) == held[:1]


# -- any order of everything -------------------------------------------------------------------------------------------


Content = tuple[Digest, bytes, tuple[int, ...]]
"""What the keys and values of one token depend on: the adapter, the salt, and the tokens up to it."""


@dataclass(eq=False)
class Holder:
    chain: PageChain
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    on_host: list[dict[int, Content]] | None = None
    parked: bool = False

    def content(self, position: int) -> Content:
        return self.chain.adapter, self.chain.salt, tuple(self.tokens[: position + 1])


class Holders(RuleBasedStateMachine):
    """Sequences come, compute, park, resume and go. Nobody ever reads keys and values that are not its own."""

    PAGES = 12

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.PAGES)
        self.cache = PrefixCache(self.allocator, PAGE_TOKENS)
        self.memory: list[dict[int, Content]] = [{} for _ in range(self.PAGES)]
        self.holders: list[Holder] = []

    def one(self, data: st.DataObject, *, parked: bool) -> Holder | None:
        those = [holder for holder in self.holders if holder.parked == parked]
        return data.draw(st.sampled_from(those)) if those else None

    @rule(
        letters=st.text("ab", max_size=4), more=st.integers(0, 3),
        adapter=st.sampled_from(["", "x"]), salt=st.sampled_from([b"one", b"two"]),
    )  # fmt: skip
    def add(self, letters: str, more: int, adapter: str, salt: bytes) -> None:
        if letters or more:
            self.holders.append(Holder(PageChain(Digest(adapter), salt, PAGE_TOKENS), tokens_of(letters, more)))

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Also while it waits to be computed, a sequence may find more."""
        holder = self.one(data, parked=False)
        if holder and holder.computed == holder.chain.cached * PAGE_TOKENS == len(holder.pages) * PAGE_TOKENS:
            self.cache.attach(holder.chain, holder.tokens, holder.pages)
            holder.computed = holder.chain.cached * PAGE_TOKENS
            assert holder.computed < len(holder.tokens)

    @rule(data=st.data(), count=st.integers(1, 40), finite=st.integers(0, 9))
    def compute(self, data: st.DataObject, count: int, finite: int) -> None:
        holder = self.one(data, parked=False)
        if holder is None:
            return
        count = min(count, len(holder.tokens) - holder.computed)
        taken = self.allocator.take(max(0, pages_for(holder.computed + count, PAGE_TOKENS) - len(holder.pages)))
        if taken is None:
            return
        for page in taken:
            self.memory[page] = {}
        holder.pages += taken
        self.read(holder)
        for position in range(holder.computed, holder.computed + count):
            page = holder.pages[position // PAGE_TOKENS]
            assert not self.allocator.is_shared(page), f"page {page} is shared, and somebody writes to it"
            self.memory[page][position % PAGE_TOKENS] = holder.content(position)
        holder.computed += count
        if holder.computed < len(holder.tokens):
            return
        if not finite:
            self.leave(holder)
            return
        holder.tokens.append(ord("ab"[finite % 2]))
        self.cache.insert(holder.chain, holder.tokens, holder.pages, holder.computed // PAGE_TOKENS)

    @rule(data=st.data(), times=st.integers(1, 40))
    def decode(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            self.compute(data, 100, 2)

    @rule(data=st.data(), parked=st.booleans())
    def end(self, data: st.DataObject, parked: bool) -> None:
        if holder := self.one(data, parked=parked):
            self.leave(holder)

    @rule(data=st.data(), swap=st.booleans())
    def park(self, data: st.DataObject, swap: bool) -> None:
        holder = self.one(data, parked=False)
        if holder is None:
            return
        if swap:
            holder.on_host = [
                dict(self.memory[page]) for page in holder.pages[: pages_for(holder.computed, PAGE_TOKENS)]
            ]
        else:
            holder.computed = 0
        self.release(holder)
        holder.parked = True

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        holder = self.one(data, parked=True)
        if holder is None:
            return
        self.cache.attach(holder.chain, holder.tokens, holder.pages, last=holder.computed // PAGE_TOKENS)
        shared = len(holder.pages)
        taken = self.allocator.take(pages_for(holder.computed, PAGE_TOKENS) - shared)
        if taken is None:
            self.release(holder)
            return
        holder.pages += taken
        for page, content in zip(taken, (holder.on_host or [])[shared:], strict=True):
            self.memory[page] = dict(content)
        holder.parked, holder.on_host = False, None

    @rule(count=st.integers(1, PAGES))
    def somebody_else_needs_pages(self, count: int) -> None:
        free = self.allocator.free
        taken = self.allocator.take(count)
        assert (taken is not None) == (count <= free)
        for page in taken or []:
            self.memory[page] = {}
        self.allocator.give(taken or [])

    @rule(data=st.data())
    def pages_are_moved(self, data: st.DataObject) -> None:
        empty = sorted(self.allocator.empty_pages)
        full = [page for page in range(self.PAGES) if page not in empty]
        moves = dict(zip(data.draw(st.permutations(full)), data.draw(st.permutations(empty)), strict=False))
        self.allocator.relocate(moves)
        self.cache.relocate(moves)
        for old, new in moves.items():
            self.memory[new] = self.memory[old]
        for holder in self.holders:
            holder.pages = [moves.get(page, page) for page in holder.pages]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def match_changes_nothing(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        before = self.allocator.free, len(self.cache)
        self.cache.match(holder.chain, holder.tokens)
        assert (self.allocator.free, len(self.cache)) == before

    def read(self, holder: Holder) -> None:
        for position in range(holder.computed):
            page = holder.pages[position // PAGE_TOKENS]
            assert self.memory[page].get(position % PAGE_TOKENS) == holder.content(position)

    def release(self, holder: Holder) -> None:
        self.allocator.give(holder.pages)
        holder.pages, holder.chain.cached = [], 0

    def leave(self, holder: Holder) -> None:
        self.release(holder)
        self.holders.remove(holder)

    @invariant()
    def everything_adds_up(self) -> None:
        self.allocator.check((holder.pages for holder in self.holders), self.cache.held)
        self.cache.check()
        in_use = {page for holder in self.holders for page in holder.pages}
        assert self.allocator.free == self.PAGES - len(in_use)
        assert len(in_use) == sum(len(holder.pages) for holder in self.holders) - self.allocator.repeated

    @invariant()
    def every_sequence_has_its_own_keys_and_values(self) -> None:
        for holder in self.holders:
            if not holder.parked:
                self.read(holder)

    @invariant()
    def every_cached_page_holds_what_its_digest_says(self) -> None:
        for page in self.cache.held:
            adapter, salt, tokens = self.memory[page][PAGE_TOKENS - 1]
            own = PageChain(adapter, salt, PAGE_TOKENS)
            assert self.cache.match(own, [*tokens, 0])[-1] == page

    def teardown(self) -> None:
        for holder in list(self.holders):
            self.leave(holder)
        assert self.allocator.free == self.PAGES


Holders.TestCase.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestHolders = Holders.TestCase
