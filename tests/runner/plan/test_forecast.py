"""The largest need at any later iteration, and who may join by it."""

import tracemalloc
from collections.abc import Sequence
from itertools import count, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from motet.domain import PAGE_TOKENS, ParkMethod, RequestId, pages_for
from motet.errors import Declined
from motet.shared_pages import ReportedLedger
from motet_runner.interface import ParkedNow
from motet_runner.plan import PRESETS, forecast
from motet_runner.plan.forecast import (
    DEVIATIONS,
    LengthLaw,
    Need,
    Outlook,
    Prospect,
    log_survival,
    pages_of_longest_lives,
)
from tests.runner.plan import plain_forecast
from tests.runner.plan.fake_device import FakeDevice, make_planner, new

FORECAST, PROMISES = PRESETS["paged-chunk"], PRESETS["paged-promises"]
quantiles = st.lists(st.integers(1, 5000), min_size=4, max_size=4).map(sorted)
prospects = st.builds(
    lambda prompt, generated, left, law: Prospect(prompt + generated, generated, generated + left, LengthLaw.of(law)),
    st.integers(1, 2000),
    st.integers(0, 4000),
    st.integers(1, 4000),
    quantiles,
)


page_sizes = st.sampled_from([PAGE_TOKENS, 32, 128])


def outlook_of(of: Sequence[Prospect], page_tokens: int = PAGE_TOKENS) -> Outlook:
    outlook = Outlook(page_tokens)
    outlook.add(of)
    return outlook


def largest_need(of: Sequence[Prospect], *, deviations: float = DEVIATIONS) -> Need:
    return outlook_of(of).need(deviations=deviations)


def survival(law: LengthLaw, *lengths: int) -> list[float]:
    return np.exp(log_survival(np.array(lengths, dtype=float), [np.asarray(one) for one in law])).tolist()


@pytest.mark.parametrize("at", [(100, 230, 360, 520), (1, 2, 3, 4), (10, 11, 900, 5000)])
def test_a_law_goes_through_its_quantiles(at: Sequence[int]) -> None:
    assert survival(LengthLaw.of(at), *at) == pytest.approx([0.5, 0.2, 0.1, 0.05])


@given(at=quantiles)
def test_longer_answers_are_less_likely(at: list[int]) -> None:
    chances = survival(LengthLaw.of(at), *range(0, 20_000, 37))
    assert chances[0] > 0.5
    assert all(later <= earlier for earlier, later in pairwise(chances))
    assert chances[-1] > 0, "an answer beyond all quantiles may still go on"


@given(of=st.lists(prospects, min_size=1, max_size=12))
def test_the_need_is_between_what_is_held_and_what_the_longest_lives_hold(of: list[Prospect]) -> None:
    need = largest_need(of)
    assert sum(pages_for(one.tokens, PAGE_TOKENS) for one in of) <= need.pages
    assert need.pages <= sum(pages_for(one.tokens + one.most - one.generated, PAGE_TOKENS) for one in of)
    assert len(need.of_each) == len(of)
    assert sum(need.of_each) == need.pages
    assert min(need.of_each) >= 1


@example(
    of=[
        *[Prospect(1, 0, 1, LengthLaw.at(1))] * 2,
        Prospect(1, 0, 1041, LengthLaw.of((1, 1, 1, 2766))),
    ],
    another=Prospect(1, 0, 1042, LengthLaw.at(1)),
)
@given(of=st.lists(prospects, min_size=1, max_size=12), another=prospects)
def test_one_more_never_needs_less(of: list[Prospect], another: Prospect) -> None:
    assert largest_need([*of, another], deviations=0).pages >= largest_need(of, deviations=0).pages


@given(of=st.lists(prospects, min_size=1, max_size=12))
def test_no_need_exceeds_the_sum_of_all_ends(of: list[Prospect]) -> None:
    assert largest_need(of).pages <= plain_forecast.sum_of_ends(of)


@given(of=st.lists(prospects, min_size=1, max_size=12), size=page_sizes)
def test_the_pages_of_the_longest_lives_are_exact(of: list[Prospect], size: int) -> None:
    steps = np.arange(max(one.most - one.generated for one in of))
    each = [-(-(one.tokens + steps) // size) * (one.generated + steps < one.most) for one in of]
    assert pages_of_longest_lives(of, size) == np.sum(each, axis=0).max()


windowed = st.builds(lambda one, pages: one._replace(most_pages=pages) if pages else one, prospects, st.integers(0, 90))


@given(
    of=st.lists(windowed, max_size=9),
    then=st.lists(windowed, max_size=3),
    also=st.lists(windowed, max_size=1),
    size=page_sizes,
)
def test_an_outlook_is_the_plain_forecast(
    of: list[Prospect], then: list[Prospect], also: list[Prospect], size: int
) -> None:
    """Whatever of it was known before the others came"""
    outlook = outlook_of(of, size)
    asked = outlook.need().pages
    assert asked == plain_forecast.largest_need(of, page_tokens=size)[0]
    outlook.add(then)
    need = outlook.need(also)
    assert (need.pages, need.of_each) == plain_forecast.largest_need([*of, *then, *also], page_tokens=size)


@given(of=st.lists(st.tuples(windowed, st.floats(0, 1)), min_size=1, max_size=12), size=page_sizes)
def test_with_shared_pages_it_is_the_plain_forecast(of: list[tuple[Prospect, float]], size: int) -> None:
    each, plain_lives = [one for one, _ in of], plain_forecast.pages_of_longest_lives
    assert pages_of_longest_lives(each, size) == plain_lives(each, [0] * len(each), page_tokens=size)
    shared = [0, *(int(share * min(pages_for(one.tokens, size), one.most_pages)) for one, share in of[1:])]  # one pays
    plainly = plain_forecast.largest_need(each, shared, page_tokens=size)[0]
    assert outlook_of(each, size).need(shared=shared).pages == plainly
    assert pages_of_longest_lives(each, size, shared) == plain_lives(each, shared, page_tokens=size)


def test_sequences_that_end_at_different_times_need_less_than_the_sum() -> None:
    """One is near its end, the other has just begun. Together they never need both of their ends."""
    soon = Prospect(320, 300, 2000, LengthLaw.at(310))
    later = Prospect(20, 0, 2000, LengthLaw.at(300))
    assert largest_need([soon], deviations=0).pages >= 20
    assert largest_need([soon, later], deviations=0).pages < 20 + pages_for(320, PAGE_TOKENS)


def test_what_was_generated_counts() -> None:
    """Half of the answers end within 20 tokens. One that has 100 already is expected to have many more."""
    law = LengthLaw.of((20, 300, 600, 1000))
    fresh, old = Prospect(50, 0, 2000, law), Prospect(50, 40, 2040, law)
    assert largest_need([old] * 20).pages > 1.5 * largest_need([fresh] * 20).pages


def test_pages_that_sequences_share_count_once() -> None:
    alike = outlook_of([Prospect(160, 0, 20, LengthLaw.at(16))] * 4)
    apart = alike.need(deviations=0).pages
    assert alike.need(shared=[0, 10, 10, 10], deviations=0).pages <= apart - 20


def test_the_parts_of_many_small_needs_are_the_need() -> None:
    """Each has 7.49 pages of it: the scheduler, which sums what each is charged, would see 130 pages too many free."""
    of = [Prospect(100, 0, 2000, LengthLaw.of((60, 150, 250, 400)))] * 267
    need = largest_need(of)
    assert sum(need.of_each) == need.pages
    assert max(need.of_each) - min(need.of_each) <= 1


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_each_of_many_that_come_between_two_iterations_costs_only_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast of all of them for each one that asks would hold up the decodes of everybody."""
    asked = 0

    def counted(lengths: np.ndarray, law: Sequence[np.ndarray]) -> np.ndarray:
        nonlocal asked
        asked += len(lengths)
        return log_survival(lengths, law)

    monkeypatch.setattr(forecast, "log_survival", counted)
    planner = make_planner(pages=5000, places=1000, preset=FORECAST)
    joined = declined = 0
    for number in range(700):
        lengths = (100 + number % 50, 200, 300, 400)
        try:
            planner.commands.add(new(f"r{number}", prompt=100, max_tokens=1000, promise=20, quantiles=lengths))
            joined += 1
        except Declined:
            declined += 1
    assert joined > 300
    assert declined > 100
    assert asked < 4 * 700


def test_who_needs_no_less_than_one_that_was_declined_is_declined_without_a_forecast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = make_planner(pages=10, places=10, preset=FORECAST)
    planner.commands.add(new("a", prompt=16, max_tokens=80, quantiles=(80,) * 4))
    with pytest.raises(Declined, match="12 pages are expected to be needed"):
        planner.commands.add(new("b", prompt=16, max_tokens=80, quantiles=(80,) * 4))
    with monkeypatch.context() as without_forecast:
        without_forecast.delattr(Outlook, "need")
        for name, prompt in (("c", 16), ("d", 40)):
            with pytest.raises(Declined, match="12 pages are expected to be needed"):
                planner.commands.add(new(name, prompt=prompt, max_tokens=80, quantiles=(80,) * 4))
    planner.commands.add(new("shorter", prompt=16, max_tokens=80, quantiles=(8,) * 4))
    planner.commands.cancel(RequestId("a"))
    planner.commands.add(new("b", prompt=16, max_tokens=80, quantiles=(80,) * 4))
    planner.check()


def test_who_shares_pages_like_one_that_was_declined_is_declined_without_a_forecast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = make_planner(pages=40, places=64, chunk_tokens=1000, preset=FORECAST)
    device = FakeDevice(planner)
    salted = {"prompt": 100, "max_tokens": 400, "promise": 32, "like": "s", "ignore_eos": True}
    planner.commands.add(new("a", salt=b"one", **salted))
    device.step()
    device.step()
    expected = {}
    for salt in (b"one", b"other"):
        with pytest.raises(Declined, match="pages are expected to be needed") as declined:
            planner.commands.add(new(f"first {salt!r}", salt=salt, **salted))
        expected[salt] = str(declined.value)
    assert expected[b"one"] != expected[b"other"]
    monkeypatch.delattr(Outlook, "need")
    for salt, why in expected.items():
        with pytest.raises(Declined) as declined:
            planner.commands.add(new(f"second {salt!r}", salt=salt, **salted))
        assert str(declined.value) == why


class Counted(list[int]):
    """Counts how many of its pages anybody looks at."""

    looked_at = 0

    def __getitem__(self, at):
        found = super().__getitem__(at)
        Counted.looked_at += len(found) if isinstance(at, slice) else 1
        return Counted(found) if isinstance(at, slice) else found

    def __iter__(self):
        for page in super().__iter__():
            Counted.looked_at += 1
            yield page


def test_who_pays_for_shared_pages_is_found_without_a_look_at_each_page() -> None:
    """Two of a hundred share one page, and eighty a prompt of a hundred pages."""
    planner = make_planner(pages=20_000, places=200, chunk_tokens=100_000, preset=FORECAST)
    device = FakeDevice(planner)
    for like, prompt, number in (("one", 24, 2), ("apart", 1616, 18), ("prompt", 1616, 80)):
        for at in range(number):
            name = f"{like}-{at}"
            shares = {"like": name, "salt": b""} if like == "apart" else {"like": like, "salt": b"one"}
            planner.commands.add(new(name, prompt=prompt, max_tokens=90, ignore_eos=True, **shares))
            for _ in range(2 if at == 0 else 0):
                device.step()
    assert planner.memory.pages.repeated == 1 + 79 * 100
    device.step()
    for sequence in planner.sequences:
        sequence.pages = Counted(sequence.pages)
    planner.memory.charges()
    assert Counted.looked_at < 20 * 100, "all of them: 10,000"


def test_the_longest_lives_of_many_are_not_compared_each_with_each() -> None:
    of = [Prospect(100, number % 90, 2000, LengthLaw.endless()) for number in range(50_000)]
    tracemalloc.start()
    try:
        pages_of_longest_lives(of, PAGE_TOKENS)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 50_000 * 1000, "each with each: 20 GB"


# -- in the plan -------------------------------------------------------------------------------------------------------


def test_a_request_joins_while_another_one_is_about_to_end() -> None:
    """Ten pages. Their promises are twelve; but the first one ends before the second one needs its last pages."""
    for preset, joins in ((FORECAST, True), (PROMISES, False)):
        planner = make_planner(pages=10, preset=preset)
        device = FakeDevice(planner)
        planner.commands.add(new("old", prompt=16, max_tokens=80, quantiles=(80,) * 4))
        for _ in range(72):
            device.step()
        try:
            planner.commands.add(new("young", prompt=16, max_tokens=80, quantiles=(80,) * 4))
            joined = True
        except Declined:
            joined = False
        assert joined is joins, preset
        device.run()
        assert not planner.sequences.parked()


def test_without_an_estimate_the_promise_counts_whole() -> None:
    """Nobody knows when such a sequence ends. Two that begin together need the sum of their promises."""
    planner = make_planner(pages=10, preset=FORECAST)
    planner.commands.add(new("a", prompt=16, max_tokens=64, promise=5))
    planner.commands.add(new("b", prompt=16, max_tokens=64, promise=5))
    with pytest.raises(Declined):
        planner.commands.add(new("c", prompt=16, max_tokens=64, promise=5))


def test_nobody_joins_beyond_the_forecast() -> None:
    planner = make_planner(pages=10, preset=FORECAST)
    planner.commands.add(new("a", prompt=16, max_tokens=80, quantiles=(80,) * 4))
    with pytest.raises(Declined, match=r"pages are expected to be needed with it, and 10 can be given"):
        planner.commands.add(new("b", prompt=16, max_tokens=80, quantiles=(80,) * 4))


def test_the_last_steps_of_lives_that_surely_end_late_count() -> None:
    """Both have 75 pages in the last step of the first one. The steps of a forecast miss that by 16 %."""
    planner = make_planner(pages=147, preset=FORECAST)
    planner.commands.add(new("a", prompt=200, max_tokens=1000, quantiles=(1500,) * 4))
    with pytest.raises(Declined, match="150 pages are expected to be needed with it, and 147"):
        planner.commands.add(new("b", prompt=200, max_tokens=1500, quantiles=(1500,) * 4))


def test_what_is_charged_is_what_decides_who_may_join() -> None:
    """Nobody estimates. The steps of a forecast miss the end of equal long lives, where the need is largest: a
    scheduler that sums other charges would place requests that the runner declines, again and again."""
    planner = make_planner(pages=2000, places=64, chunk_tokens=512, preset=FORECAST)
    device = FakeDevice(planner, checks_each=1000)
    with pytest.raises(Declined, match=r"([0-9]+) pages are expected") as declined:
        for number in count():
            planner.commands.add(new(f"r{number}", prompt=100, max_tokens=2000, promise=132, ignore_eos=True))
            for _ in range(3):
                device.step()
    with_one_more = int(str(declined.value).split()[0])
    promised = planner.memory.ledger.promised
    assert promised == sum(planner.memory.charges().values())
    assert with_one_more - promised <= 132
    assert 2000 - promised < 132, "the scheduler would place another one"


def test_pages_that_others_share_make_no_room_for_long_lives() -> None:
    """When these are longest, the short ones that share a prompt have ended, and what sharing saved with them."""
    planner = make_planner(pages=100, places=64, chunk_tokens=1000, preset=FORECAST)
    device = FakeDevice(planner)
    for number in range(10):
        short = new(f"s{number}", prompt=324, max_tokens=32, promise=23, quantiles=(32,) * 4, like="s", salt=b"one")
        planner.commands.add(short)
        for _ in range(2 * (number == 0)):
            device.step()
    assert planner.memory.pages.repeated == 180
    joined = 0
    with pytest.raises(Declined):
        for number in count():
            planner.commands.add(new(f"l{number}", prompt=16, max_tokens=400, promise=26, ignore_eos=True))
            joined += 1
    assert 1 <= joined <= 3, "more than these surely need more than all pages"
    device.run()
    assert not any(isinstance(event, ParkedNow) for event in device.events)


@pytest.mark.parametrize(("size", "each"), [(PAGE_TOKENS, 5), (32, 3)])
@pytest.mark.parametrize("quantiles", [None, (1000,) * 4])
def test_pages_that_a_window_gives_back_make_room_for_others(
    quantiles: tuple[int, ...] | None, size: int, each: int
) -> None:
    """While they decode, each of twenty has `each` pages at most, and never those of all its tokens."""
    pages, whole = 20 * each, pages_for(40 + 1000, size)
    planner = make_planner(page_tokens=size, pages=pages, places=64, chunk_tokens=512, window=64, preset=FORECAST)
    device = FakeDevice(planner)
    most = joined = 0
    with pytest.raises(Declined):
        for number in count():
            planner.commands.add(
                new(f"r{number}", prompt=40, max_tokens=1000, promise=whole, ignore_eos=True, quantiles=quantiles)
            )
            joined += 1
            for _ in range(3):
                device.step()
    assert joined >= 18
    while planner.has_work():
        device.step()
        held = [len(sequence.pages) for sequence in planner.sequences]
        assert all(len(one.pages) <= one.held_at_most for one in planner.sequences)
        most = max(most, sum(held))
    assert each * joined - 20 <= most <= pages
    assert not any(isinstance(event, ParkedNow) for event in device.events)


@settings(max_examples=30)
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.integers(1, 90),
            st.integers(1, 60),
            st.none() | quantiles,
            st.integers(0, 3),
            st.booleans(),
        ),
        max_size=12,
    ),
    size=page_sizes,
)
def test_what_is_charged_is_the_plain_forecast_whoever_shares_pages(
    asked: list[tuple[str, int, int, list[int] | None, int, bool]], size: int
) -> None:
    planner = make_planner(page_tokens=size, pages=400, places=16, chunk_tokens=200, preset=FORECAST)
    device = FakeDevice(planner)
    for number, (like, prompt, most, lengths, steps, ends) in enumerate(asked):
        planner.commands.add(
            new(f"r{number}", prompt=prompt, max_tokens=most, like=like, salt=b"one", quantiles=lengths)
        )
        for _ in range(steps):
            device.step()
        if ends:
            planner.commands.cancel(RequestId(f"r{number // 2}"))
        everybody = sorted(planner.sequences, key=lambda one: one.arrival)
        prospects = [one.prospect for one in everybody]
        plain = plain_forecast.charges(prospects, [one.pages for one in everybody], page_tokens=size)
        assert tuple(planner.memory.charges().values()) == plain
        at_ends = [plain_forecast.sum_of_ends([one], page_tokens=size) for one in prospects]
        assert [one.end_pages for one in everybody] == at_ends
        planner.check()


@settings(max_examples=20)
@given(
    asked=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 90), st.integers(1, 90), st.integers(0, 5)),
        min_size=1,
        max_size=12,
    ),
    ahead=st.integers(0, 1),
    supervised=st.booleans(),
    window=st.sampled_from([None, 20]),
)
def test_everybody_finishes_whatever_the_estimates_say(
    asked: list[tuple[int, int, int, int]], ahead: int, supervised: bool, window: int | None
) -> None:
    """Estimates may be wrong in every way. FakeDevice checks each step where the KV of all earlier tokens is."""
    planner = make_planner(pages=12, places=4, preset=FORECAST, window=window)
    planner.commands.supervised = supervised
    device = FakeDevice(planner, ahead=ahead)
    waiting = [
        (gap, new(f"r{number}", prompt=prompt, max_tokens=most, quantiles=(said,) * 4))
        for number, (prompt, most, said, gap) in zip(count(), asked, strict=False)
    ]
    while waiting or len(planner.sequences):
        if waiting:
            gap, first = waiting[0]
            for _ in range(gap):
                device.step()
            try:
                planner.commands.add(first)
                del waiting[0]
            except Declined:
                pass
        for sequence in planner.sequences.parked() if supervised else ():
            planner.commands.resume(sequence.request, sequence.new.epoch, sequence.wanted)
        device.step()
        planner.check()
    assert len(device.finished) == len(asked)


@pytest.mark.parametrize(
    ("pages", "prompt", "lives", "overcommit"),
    [(10, 16, (128, 128), 1), (10, 16, (128, 128), 2), (147, 200, (1000, 1500), 1)],
)
def test_the_whole_lives_of_those_that_must_not_be_parked_again_fit(
    pages: int, prompt: int, lives: tuple[int, int], overcommit: float
) -> None:
    """By their estimates both would fit. But these were wrong, and who was parked twice is no victim any more: one of
    two that together have no room would be given up."""
    planner = make_planner(pages=pages, preset=FORECAST)
    planner.commands.set_overcommit(overcommit)
    planner.commands.supervised = True
    resumed = []
    for name, most in zip("ab", lives, strict=True):
        promise = pages_for(prompt + 1, PAGE_TOKENS)
        sequence = planner.commands.add(new(name, prompt=prompt, max_tokens=most, promise=promise, quantiles=(1,) * 4))
        for _ in range(2):
            assert planner.commands.park(sequence.request, 1, sequence.promise, 2, ParkMethod.RECOMPUTE)
            resumed.append(planner.commands.resume(sequence.request, 1, sequence.wanted))
    assert resumed == [True, True, True, False]
    planner.check()


def test_who_may_come_back_by_the_scheduler_s_ledger_comes_back_to_free_pages() -> None:
    """Its sum of the parts of three leaves two pages. The forecast for four exceeds all pages: the runner would refuse
    again and again what the scheduler allows."""
    planner = make_planner(pages=11, preset=FORECAST)
    planner.commands.supervised = True
    likely = {"prompt": 2, "max_tokens": 140, "promise": 2, "quantiles": (50, 60, 70, 120)}
    back = planner.commands.add(new("back", **likely))
    assert planner.commands.park("back", 1, 2, 2, ParkMethod.RECOMPUTE)
    for name in ("a", "b", "c"):
        planner.commands.add(new(name, **likely))
    scheduler: ReportedLedger[RequestId] = ReportedLedger(11, by_forecast=True)
    for request, charged in planner.memory.charges().items():
        scheduler.record(request, 2, shared=2 - charged)
    assert scheduler.free == back.wanted
    with pytest.raises(Declined):
        planner.commands.add(new("d", **likely))
    assert planner.commands.resume("back", 1, scheduler.free)
    planner.check()
