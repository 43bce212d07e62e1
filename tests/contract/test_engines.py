"""What a runner's service expects of an engine: the real one and the fake one pass the same tests."""

from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.domain import Digest, ParkMethod, RequestId, pages_for
from motet.errors import (
    TOO_FEW_PAGES,
    ContextLengthExceeded,
    Declined,
    InvalidRequest,
    MotetError,
    ParameterUnavailable,
    StructuredOutputUnavailable,
)
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.interface import (
    AdapterEvicted,
    AdapterLoaded,
    Finish,
    OverflowAhead,
    ParkedNow,
    ProofEnded,
    ResumedNow,
    State,
    StateChanged,
)
from tests.contract.engines import Size, fake, real
from tests.runner.engines import EngineRun, ask, run

A, B, C = map(Digest, "ABC")
R = RequestId


def book_of(engine):
    return {entry.request: entry for entry in engine.report().sequences}


def run_to_first_token(engine, sequence):
    """However long its adapter is loaded"""
    ran = run(engine, sequence, steps=1)
    while not ran.tokens.get(sequence.request):
        run(engine, ran=ran, steps=1)
    return ran


def on_device(engine):
    return {entry.digest for entry in engine.report().adapters if entry.on_device}


# ------------------------------------------------------------------------------------------------------------- tokens


def test_an_engine_reports_its_sizes(engine_of):
    info = engine_of(Size(pages=8, host_pages=4, sequences=3, slots=2, length=100)).info
    assert (info.pages, info.page_tokens, info.max_sequences, info.adapter_slots) == (8, 16 * engine_of.factor, 3, 2)
    assert info.host_bytes == (0 if "host memory" in engine_of.lacks else 4 * info.page_bytes)
    assert info.max_model_length == 100 * engine_of.factor


def test_the_context_is_never_longer_than_the_memory(engine_of):
    engine = engine_of(Size(pages=8, length=512))
    assert engine.info.max_model_length == 128 * engine_of.factor
    with pytest.raises(ContextLengthExceeded):
        engine.add(engine_of.ask("a", prompt=100, max_tokens=29, promise=8))


def test_each_sequence_gets_every_token_once_in_order(engine_of):
    ran = run(engine_of(Size(pages=16)), *(ask(name, max_tokens=20 + n) for n, name in enumerate("abc")))
    for n, name in enumerate("abc"):
        outputs = [one for one in ran.outputs if one.request == name]
        assert [one.index for one in outputs] == list(range(20 + n))
        assert [one.finish for one in outputs] == [None] * (19 + n) + [Finish.LENGTH]


def test_delivered_tokens_count_and_are_not_sent_again(engine_of):
    whole = run(engine_of(Size()), ask("a")).tokens["a"]
    ran = run(engine_of(Size()), ask("a", epoch=2, delivered=tuple(whole[:30])))
    assert ran.outputs[0].index == 30
    assert ran.tokens["a"] == whole[30:]


def test_a_stop_token_ends_the_sequence_and_is_sent(engine_of):
    whole = run(engine_of(Size()), ask("a")).tokens["a"]
    ran = run(engine_of(Size()), ask("a", stop_token_ids=frozenset({whole[9]})))
    assert ran.tokens["a"] == whole[: whole.index(whole[9]) + 1]
    assert ran.last["a"].finish is Finish.STOP


def test_at_most_max_sequences_run_and_the_others_wait(engine_of):
    engine = engine_of(Size(pages=32, sequences=2))
    ran = run(engine, *(ask(name, max_tokens=10) for name in "abcd"), steps=5)
    assert {name: entry.state for name, entry in book_of(engine).items()} == {
        "a": State.DECODE,
        "b": State.DECODE,
        "c": State.WAITING,
        "d": State.WAITING,
    }
    ran = run(engine, ran=ran)
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == dict.fromkeys("abcd", 10)


def test_a_suspect_is_announced_then_computed_alone_until_it_has_proved_itself(engine_of):
    engine = engine_of(Size(pages=16))
    ran = run(engine, ask("plain"), steps=1)
    engine.add(replace(ask("suspect"), engines_lost=1))
    alone: list[str] = []
    while engine.has_work():
        output = engine.step()
        together = {one.request for one in output.sequences}
        announced = [event.request for event in output.events if isinstance(event, StateChanged) and event.alone]
        if alone:
            assert together == {"suspect"}
        alone = announced
        if announced:
            # One ahead, what was launched before the announcement is collected with it.
            assert together <= ({"plain"} if engine_of.ahead else set()), "it is said before the iteration"
        for one in output.sequences:
            ran.tokens.setdefault(one.request, []).extend(one.tokens)
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == {"plain": 40, "suspect": 40}


# ------------------------------------------------------------------------------------------------------------ admission


def impossible(engine_of):
    ask = engine_of.ask
    return {
        "empty": (ask("a", prompt=()), InvalidRequest),
        "silent": (ask("a", max_tokens=0, promise=1), InvalidRequest),
        "too long": (ask("a", prompt=90, max_tokens=39, promise=8), ContextLengthExceeded),
        "all said": (ask("a", delivered=(1,) * 40 * engine_of.factor), InvalidRequest),
        "no pages": (replace(ask("a"), promise=0), InvalidRequest),
        "too many pages": (ask("a", promise=9), InvalidRequest),
        "a negative token": (ask("a", prompt=(1, -1)), InvalidRequest),
        "an unknown token": (ask("a", prompt=(1, 1_000_000)), InvalidRequest),
    }


def test_an_impossible_request_is_refused_for_good(engine_of):
    engine = engine_of(Size(pages=8))
    for what, (sequence, error) in impossible(engine_of).items():
        with pytest.raises(error):
            engine.add(sequence)
        assert not book_of(engine), what
        assert engine.report().pages_promised == 0, what


def test_a_request_that_does_not_fit_now_is_declined_and_changes_nothing(engine_of):
    engine = engine_of(Size(pages=8))
    engine.add(engine_of.ask("a", prompt=82, max_tokens=10))
    with pytest.raises(Declined) as declined:
        engine.add(engine_of.ask("b", prompt=34, max_tokens=10))
    assert declined.value.reason == TOO_FEW_PAGES
    assert set(book_of(engine)) == {"a"}
    assert engine.report().pages_promised == 6
    engine.add(engine_of.ask("c", prompt=20, max_tokens=10))


@pytest.mark.parametrize("epoch", [2, 3])
def test_the_same_or_a_lower_epoch_is_declined_and_the_running_one_continues(engine_of, epoch):
    engine = engine_of(Size())
    ran = run(engine, ask("a", epoch=3), steps=5)
    with pytest.raises(Declined) as declined:
        engine.add(ask("a", epoch=epoch))
    assert declined.value.reason == "", "more free pages would not help"
    run(engine, ran=ran)
    assert len(ran.tokens["a"]) == 40


def test_a_higher_epoch_replaces_a_lower_one_and_gets_its_pages(engine_of):
    engine = engine_of(Size(pages=8))
    run(engine, engine_of.ask("a", epoch=1, prompt=80), steps=5)
    engine.add(engine_of.ask("a", epoch=2, prompt=40))
    assert book_of(engine)["a"].epoch == 2
    assert engine.report().pages_promised == 5
    ran = run(engine)
    assert {one.epoch for one in ran.outputs} == {2}
    assert len(ran.tokens["a"]) == 40 * engine_of.factor


def test_new_sequences_leave_pages_for_parked_ones_unless_a_supervisor_decides(engine_of):
    engine = engine_of(Size(pages=8))
    engine.set_supervised(True)
    run(engine, engine_of.ask("a", prompt=60, max_tokens=30), steps=2)
    assert engine.park(R("a"), 1, 6, 6, ParkMethod.RECOMPUTE)
    engine.set_supervised(False)
    with pytest.raises(Declined) as declined:
        engine.add(engine_of.ask("b", prompt=70, max_tokens=10))
    assert declined.value.reason == TOO_FEW_PAGES
    engine.set_supervised(True)
    engine.add(engine_of.ask("b", prompt=70, max_tokens=10))


# ------------------------------------------------------------------------------------------------------------- orders


def test_orders_about_changed_sequences_are_ignored(engine_of):
    engine = engine_of(Size())
    engine.set_supervised(True)
    engine.add(engine_of.ask("a", promise=2))
    assert not engine.extend(R("a"), 2, 2, 3)
    assert not engine.extend(R("a"), 1, 1, 3)
    assert not engine.extend(R("b"), 1, 2, 3)
    assert not engine.extend(R("a"), 1, 2, 2), "no more than it has"
    assert not engine.extend(R("a"), 1, 2, 1), "less than it has"
    assert not engine.park(R("a"), 2, 2, 3, ParkMethod.RECOMPUTE)
    assert not engine.park(R("a"), 1, 1, 3, ParkMethod.RECOMPUTE)
    assert not engine.park(R("b"), 1, 2, 3, ParkMethod.RECOMPUTE)
    assert not engine.resume(R("a"), 1, 2), "it is not parked"
    assert not engine.cancel(R("a"), 2)
    assert not engine.cancel(R("b"))
    assert book_of(engine)["a"].promise == 2
    assert engine.cancel(R("a"), 1)
    assert not engine.cancel(R("a"))
    assert engine.report().pages_promised == 0


def test_an_order_about_an_earlier_promise_of_as_many_pages_is_void(engine_of):
    """A supervisor that stood still comes back with orders that it decided long ago."""
    engine = engine_of(Size())
    engine.set_supervised(True)
    engine.add(engine_of.ask("a", promise=2))
    numbers = [book_of(engine)["a"].promise_number]
    assert engine.park(R("a"), 1, 2, 2, ParkMethod.RECOMPUTE, number=numbers[-1])
    numbers.append(book_of(engine)["a"].promise_number)
    assert not engine.resume(R("a"), 1, 2, number=numbers[0])
    assert engine.resume(R("a"), 1, 2, number=numbers[1])
    entry = book_of(engine)["a"]
    numbers.append(entry.promise_number)
    assert (entry.promise, len(set(numbers))) == (2, 3)
    for old in numbers[:2]:
        assert not engine.extend(R("a"), 1, 2, 3, number=old)
        assert not engine.park(R("a"), 1, 2, 3, ParkMethod.RECOMPUTE, number=old)
    assert engine.extend(R("a"), 1, 2, 3, number=numbers[2])
    assert book_of(engine)["a"].promise_number not in numbers
    events = [event for event in engine.step().events if isinstance(event, (ParkedNow, ResumedNow))]
    assert [event.number for event in events] == numbers[1:]


def test_where_promises_must_fit_an_extension_fits_or_is_refused(engine_of):
    engine = engine_of(Size(pages=8, preset="paged-promises"))
    engine.set_supervised(True)
    engine.add(engine_of.ask("a", prompt=20, max_tokens=40, promise=1))
    engine.add(engine_of.ask("b", promise=5))
    assert not engine.extend(R("a"), 1, 1, 8), "two pages are left"
    assert engine.extend(R("a"), 1, 1, 3)
    assert not engine.extend(R("a"), 1, 3, 4), "none is left"
    assert engine.cancel(R("b"))
    assert engine.extend(R("a"), 1, 3, 4)


def test_an_extension_ends_at_the_longest_answer(engine_of):
    engine = engine_of(Size(pages=8))
    engine.set_supervised(True)
    engine.add(engine_of.ask("a", prompt=20, max_tokens=40, promise=1))
    engine.add(engine_of.ask("b", promise=5))
    assert engine.extend(R("a"), 1, 1, 8), "by forecast, promises keep no pages from others"
    assert book_of(engine)["a"].promise == 4, "the last token is never fed back"


def test_pages_are_held_as_tokens_are_computed_and_no_sooner(engine_of):
    engine = engine_of(Size(pages=8))
    engine.add(engine_of.ask("a", prompt=20, max_tokens=40))
    assert book_of(engine)["a"].pages_used == 0
    seen = []
    while engine.has_work():
        engine.step()
        if entry := book_of(engine).get(R("a")):
            seen.append((entry.output_tokens, entry.pages_used))
            assert engine.report().pages_free == 8 - entry.pages_used
    prompt, most = 20 * engine_of.factor, 60 * engine_of.factor - 1
    computing = [min(prompt + made - 1 + engine_of.ahead, most) for made in range(1, 40 * engine_of.factor)]
    used = [pages_for(tokens, engine.info.page_tokens) for tokens in computing]
    assert seen == list(enumerate(used, start=1))
    assert engine.report().pages_free == 8


def test_the_end_of_a_promise_is_announced_once(engine_of):
    engine = engine_of(Size(pages=8, patience=1000))
    engine.set_supervised(True)
    tight, wide = engine_of.ask("tight", prompt=5, promise=2), engine_of.ask("wide", prompt=5, max_tokens=60)
    ran = run(engine, tight, wide, steps=45 * engine_of.factor)
    (event,) = ran.of(OverflowAhead)
    assert (event.request, event.epoch, event.promise, event.number) == ("tight", 1, 2, 1)
    first = next(one for one in ran.outputs if one.request == "tight")
    assert first.index == 0
    in_promise = 27 * engine_of.factor
    assert len(ran.tokens["tight"]) == in_promise + 1, "the token after the last entry that two pages hold"
    assert engine.extend(R("tight"), 1, 2, 3)
    run(engine, ran=ran)
    assert len(ran.tokens["tight"]) == 40 * engine_of.factor


def test_without_a_supervisor_an_engine_doubles_promises(engine_of):
    engine = engine_of(Size(pages=16))
    ran = run(engine, engine_of.ask("a", prompt=5, max_tokens=150, promise=1))
    assert [event.promise for event in ran.of(OverflowAhead)] == [1, 2, 4, 8]
    assert len(ran.tokens["a"]) == 150 * engine_of.factor


def test_without_a_supervisor_an_engine_parks_the_newest_and_all_finish(engine_of):
    engine = engine_of(Size(pages=8))
    ran = run(engine, *(engine_of.ask(name, prompt=5, max_tokens=100, promise=2) for name in "abc"))
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == dict.fromkeys("abc", 100 * engine_of.factor)
    parked = ran.of(ParkedNow)
    assert parked[0].request == "c"
    assert all(event.by_itself for event in parked)
    assert len(ran.of(ResumedNow)) == len(parked)


@pytest.mark.parametrize("method", ParkMethod)
def test_a_parked_sequence_frees_all_pages_and_later_continues_with_the_same_tokens(engine_of, method):
    whole = run(engine_of(Size()), engine_of.ask("a")).tokens["a"]
    engine = engine_of(Size(host_pages=8))
    engine.set_supervised(True)
    ran = run(engine, engine_of.ask("a"), steps=10)
    promise = book_of(engine)["a"].promise
    assert engine.park(R("a"), 1, promise, promise + 5, method)
    report = engine.report()
    assert (report.pages_free, report.pages_promised, report.parked) == (8, 0, 1)
    if "host memory" in engine_of.lacks:
        method = ParkMethod.RECOMPUTE
    swapped = 2 if method is ParkMethod.SWAP else 0
    assert report.host_bytes_free == engine.info.host_bytes - swapped * engine.info.page_bytes
    assert book_of(engine)["a"].promise == 4, "no more than its whole life"
    assert not engine.extend(R("a"), 1, promise, 4)
    assert not engine.park(R("a"), 1, promise, 4, method)
    run(engine, ran=ran)
    assert ran.of(ParkedNow) == [ParkedNow(R("a"), 1, 4, method, by_itself=False, number=2)]
    assert not engine.resume(R("a"), 2, 4)
    assert engine.resume(R("a"), 1, 4)
    run(engine, ran=ran)
    assert ran.of(ResumedNow) == [ResumedNow(R("a"), 1, 4, method, 3)]
    assert ran.tokens["a"] == whole
    assert engine.report().host_bytes_free == engine.info.host_bytes


def test_swap_without_free_host_memory_becomes_recompute(engine_of):
    engine = engine_of(Size(host_pages=1))
    engine.set_supervised(True)
    ran = run(engine, engine_of.ask("a"), steps=10)
    assert engine.park(R("a"), 1, book_of(engine)["a"].promise, 4, ParkMethod.SWAP)
    run(engine, ran=ran)
    assert [event.method for event in ran.of(ParkedNow)] == [ParkMethod.RECOMPUTE]
    assert engine.report().host_bytes_free == engine.info.host_bytes


def test_cancelling_a_parked_sequence_frees_host_memory(engine_of):
    engine = engine_of(Size(host_pages=8))
    engine.set_supervised(True)
    run(engine, engine_of.ask("a"), steps=10)
    assert engine.park(R("a"), 1, book_of(engine)["a"].promise, 4, ParkMethod.SWAP)
    run(engine)
    assert engine.cancel(R("a"))
    run(engine)
    assert engine.report().host_bytes_free == engine.info.host_bytes


def test_no_sequence_is_parked_without_end(engine_of):
    engine = engine_of(Size(pages=8))
    engine.set_supervised(True)
    run(engine, engine_of.ask("a"), steps=2)
    for _ in range(4):
        assert engine.park(R("a"), 1, book_of(engine)["a"].promise, 4, ParkMethod.RECOMPUTE)
        assert engine.resume(R("a"), 1, 4)
        run(engine, steps=1)
    assert not engine.park(R("a"), 1, 4, 4, ParkMethod.RECOMPUTE)


def test_promises_beyond_the_pages_are_kept_by_parking_the_newest(engine_of):
    engine = engine_of(Size(pages=8))
    engine.set_overcommit(2.0)
    ran = run(engine, *(engine_of.ask(name, prompt=20, max_tokens=40, promise=4) for name in "abcd"))
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == dict.fromkeys("abcd", 40 * engine_of.factor)
    assert ran.of(ParkedNow)[0].request == "d"


def test_a_factor_that_no_pool_may_choose_is_refused(engine_of):
    engine = engine_of(Size(pages=8))
    for factor in (1e308, inf, nan, 4.1, 0.99, 0.0, -1.0):
        with pytest.raises(InvalidRequest, match="use 1 to 4"):
            engine.set_overcommit(factor)
    assert len(run(engine, ask("a", max_tokens=4)).tokens["a"]) == 4


# ----------------------------------------------------------------------------------------------------------- adapters


def test_a_known_adapter_is_prefetched_only_while_a_slot_is_free(engine_of, layout):
    engine = engine_of(Size(pages=32, slots=2))
    for digest in (A, B, C):
        engine.load_adapter(digest, layout)
    ran = run(engine)
    assert on_device(engine) == {A, B}
    assert {event.digest for event in ran.of(AdapterLoaded)} == {A, B}
    assert {entry.digest for entry in engine.report().adapters} == {A, B}, "a report lists no adapter that only waits"
    assert not engine.has_work()


def test_the_least_recently_used_adapter_is_evicted_and_never_a_used_one(engine_of, layout):
    engine = engine_of(Size(pages=32, slots=2))
    for digest in (A, B, C):
        engine.load_adapter(digest, layout)
    run(engine)
    for digest in (A, B, C):
        run(engine, ask("q", adapter=digest))
    assert on_device(engine) == {B, C}
    ran = run(engine, ask("b", adapter=B), ask("c", adapter=C), steps=2)
    engine.add(ask("a", adapter=A))
    while len(engine.report().sequences) == 3:
        assert on_device(engine) == {B, C}
        assert book_of(engine)["a"].state is State.LOADING
        ran.take(engine)
    run(engine, ran=ran)
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == dict.fromkeys("abc", 40)


def test_sequences_wait_for_their_adapter_and_share_one_load(engine_of, layout):
    engine = engine_of(Size(pages=32))
    for name in "abc":
        engine.add(ask(name, adapter=A))
    run(engine)
    assert not engine.has_work()
    assert engine.report().waiting == 3
    for _ in range(2):
        engine.load_adapter(A, layout)
    ran = run(engine)
    assert [event.digest for event in ran.of(AdapterLoaded)] == [A]
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == dict.fromkeys("abc", 40)


def test_a_dropped_adapter_stays_until_its_last_sequence_has_finished(engine_of, layout):
    engine = engine_of(Size(pages=32))
    engine.load_adapter(A, layout)
    ran = run_to_first_token(engine, ask("a", adapter=A))
    engine.drop_adapter(A)
    engine.drop_adapter(B)
    assert on_device(engine) == {A}
    assert [entry.live for entry in engine.report().adapters] == [1]
    run(engine, ran=ran)
    assert len(ran.tokens["a"]) == 40
    assert not engine.report().adapters
    assert [event.digest for event in ran.of(AdapterEvicted)] == [A]


def test_a_dropped_adapter_that_is_needed_again_stays(engine_of, layout):
    engine = engine_of(Size(pages=32))
    engine.load_adapter(A, layout)
    ran = run_to_first_token(engine, ask("a", adapter=A))
    engine.drop_adapter(A)
    engine.load_adapter(A, layout)
    run(engine, ran=ran)
    assert on_device(engine) == {A}
    assert not ran.of(AdapterEvicted)


def test_a_parked_sequence_releases_its_adapters_slot_and_gets_one_again(engine_of, layout):
    engine = engine_of(Size(pages=20, slots=1, host_pages=8))
    engine.set_supervised(True)
    for digest in (A, B):
        engine.load_adapter(digest, layout)
    ran = run_to_first_token(engine, ask("a", adapter=A))
    promise = book_of(engine)["a"].promise
    assert engine.park(R("a"), 1, promise, promise, ParkMethod.SWAP)
    assert {entry.digest: entry.live for entry in engine.report().adapters} == {A: 0}
    run(engine, ask("b", adapter=B), ran=ran)
    assert on_device(engine) == {B}
    engine.drop_adapter(A)
    run(engine, ran=ran)
    assert engine.resume(R("a"), 1, promise)
    run(engine, ran=ran)
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == {"a": 40, "b": 40}
    assert not engine.report().adapters, "A is forgotten, and B waits on the disk"


def test_an_evicted_adapter_is_reported_also_by_an_idle_engine(engine_of, layout):
    engine = engine_of(Size(pages=32))
    engine.load_adapter(A, layout)
    run(engine)
    engine.drop_adapter(A)
    assert [event.digest for event in run(engine).of(AdapterEvicted)] == [A]
    assert not engine.has_work()


def test_adapters_in_use_have_pages_that_kv_cannot_have(engine_of, layout):
    engine = engine_of(Size(pages=20))
    assert engine.report().pages == 20
    for digest in (A, B):
        engine.load_adapter(digest, layout)
    run(engine)
    assert (engine.report().pages, engine.report().pages_free) == (20, 20), "nobody uses them"
    ran = run(engine, engine_of.ask("a", adapter=A, promise=4), steps=3)
    assert (engine.report().pages, engine.free_share()) == (12, engine.report().pages_free / 12)
    with pytest.raises(Declined):
        engine.add(engine_of.ask("b", adapter=B, promise=4))
    with pytest.raises(Declined):
        engine.add(engine_of.ask("base", prompt=100))
    engine.add(engine_of.ask("base", prompt=88))
    run(engine, ran=ran)
    assert engine.report().pages == engine.report().pages_free == 20
    run(engine, engine_of.ask("b", adapter=B, promise=4), ran=ran)
    assert ran.tokens.keys() == {"a", "base", "b"}
    assert {len(tokens) for tokens in ran.tokens.values()} == {40 * engine_of.factor}


def test_a_request_that_never_fits_beside_its_adapter_is_refused(engine_of, layout):
    engine = engine_of(Size(pages=10))
    engine.add(engine_of.ask("early", adapter=A, promise=3))
    engine.load_adapter(A, layout)
    ran = run(engine)
    assert isinstance(ran.last["early"].error, InvalidRequest)
    with pytest.raises(InvalidRequest, match=r"engine\.kvCacheMiB"):
        engine.add(engine_of.ask("late", adapter=A, promise=3))
    run(engine, engine_of.ask("short", adapter=A, max_tokens=10), ran=ran)
    assert len(ran.tokens["short"]) == 10 * engine_of.factor


def test_an_idle_adapter_yields_its_pages_to_kv(engine_of, layout):
    engine = engine_of(Size(pages=12))
    engine.load_adapter(A, layout)
    run(engine)
    ran = run(engine, *(engine_of.ask(name) for name in "xyz"))
    assert [event.digest for event in ran.of(AdapterEvicted)] == [A]
    assert not ran.of(ParkedNow)
    run(engine, engine_of.ask("a", adapter=A), ran=ran)
    assert {len(tokens) for tokens in ran.tokens.values()} == {40 * engine_of.factor}
    assert on_device(engine) == {A}


# ------------------------------------------------------------------------------------------------------- side by side


NAMES = st.sampled_from("abcd")
SMALL = st.integers(1, 9)
COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NAMES, st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 60)),
        st.tuples(st.just("extend"), NAMES, SMALL),
        st.tuples(st.just("park"), NAMES, SMALL, st.sampled_from(ParkMethod)),
        st.tuples(st.just("resume"), NAMES, SMALL),
        st.tuples(st.just("cancel"), NAMES),
        st.tuples(st.just("supervised"), st.booleans()),
        st.tuples(st.just("overcommit"), st.sampled_from([1.0, 1.5, 2.0])),
        st.tuples(st.just("step"), st.integers(1, 30)),
    ),
    max_size=25,
)


class DrivenEngine:
    """An engine and a record of its outputs, without the token values and without the order within a step."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.record: list[object] = []

    def do(self, what: str, *how) -> None:
        engine, entry = self.engine, book_of(self.engine).get(how[0] if how else None)
        epoch, promise = (entry.epoch, entry.promise) if entry is not None else (1, 1)
        match what, how:
            case "add", (name, promise, epoch, prompt, max_tokens):
                new = ask(name, prompt=prompt, promise=promise, epoch=epoch, max_tokens=max_tokens)
                try:
                    engine.add(new)
                except MotetError as error:
                    self.record.append((type(error), error.message))
            case "extend", (name, extended):
                self.record.append(engine.extend(R(name), epoch, promise, extended))
            case "park", (name, wanted, method):
                self.record.append(engine.park(R(name), epoch, promise, wanted, method))
            case "resume", (name, resumed):
                self.record.append(engine.resume(R(name), epoch, resumed))
            case "cancel", (name,):
                self.record.append(engine.cancel(R(name)))
            case "supervised", (value,):
                engine.set_supervised(value)
            case "overcommit", (factor,):
                engine.set_overcommit(factor)
            case "step", (times,):
                self.step(times)
        self.record.append((what, how, sorted(book_of(engine).items())))

    def step(self, at_most: int) -> None:
        while at_most and self.engine.has_work():
            at_most -= 1
            ran = EngineRun()
            ran.take(self.engine)
            outputs = sorted((one.request, one.epoch, one.index, len(one.tokens), one.finish) for one in ran.outputs)
            self.record.append((outputs, sorted(ran.events, key=lambda event: event.request)))


@pytest.fixture(scope="module")
def pair(base_model):
    """Both engines, without host memory: the real one measures which park method is cheaper, the fake one cannot."""
    size = Size(pages=8, sequences=3, patience=2)
    return DrivenEngine(fake(size)), DrivenEngine(real(base_model, size))


@settings(max_examples=30)
@given(COMMANDS)
def test_both_engines_give_the_same_outputs_for_any_orders(pair, commands):
    for one in pair:
        one.record = []
        for command in [("supervised", False), ("overcommit", 1.0), *commands, ("supervised", False)]:
            one.do(*command)
        one.step(2000)
        assert not one.engine.has_work()
        for name in book_of(one.engine):
            one.engine.cancel(name)
    assert pair[0].record == pair[1].record


# ---------------------------------------------------------------------------------------- log probabilities of prompts


def test_a_prompt_is_scored_before_its_answer_and_none_of_it_twice(engine_of):
    engine = engine_of(Size(pages=64, host_pages=40))
    engine.set_supervised(True)
    prompt = tuple(2 + i % 300 for i in range(30))
    if "prompt_logprobs" in engine_of.lacks:
        with pytest.raises(ParameterUnavailable, match=r"^prompt_logprobs is not supported"):
            engine.add(ask("a", prompt=prompt, prompt_logprobs=2))
        return
    ran = run(engine, ask("a", prompt=prompt, prompt_logprobs=2), ask("plain", prompt=prompt))
    assert ran.scores.keys() == {"a"}
    assert [len(one.top) for one in ran.scores["a"]] == [2] * 29
    assert ran.tokens["a"] == ran.tokens["plain"]
    first = next(one for one in ran.outputs if one.request == "a")
    assert (first.prompt_index, first.index) == (1, 0)
    rest = run(engine, ask("a", prompt=prompt, prompt_logprobs=2, scored=12))
    assert [one.logprob for one in rest.scores["a"]] == pytest.approx([one.logprob for one in ran.scores["a"][11:]])
    assert next(one for one in rest.outputs if one.prompt_logprobs).prompt_index == 12


# ------------------------------------------------------------------------------------------------ masks and penalties


LISTED = [
    {"allowed_token_ids": frozenset(range(100, 108))},
    {"bad_words": ((100,), (101, 102))},
    {"allowed_token_ids": frozenset(range(100, 104)), "bad_words": ((100, 100), (101, 101), (102, 102), (103, 103))},
]


def test_an_answer_has_only_tokens_that_its_request_allows(engine_of):
    engine = engine_of(Size(pages=16))
    if "masks" in engine_of.lacks:
        for listed in LISTED:
            with pytest.raises(StructuredOutputUnavailable):
                engine.add(ask("a", **listed))
        return
    plain = run(engine, ask("b")).tokens["b"]
    answers = []
    for listed in LISTED:
        ran = run(engine, ask("a", **listed), ask("b"))
        whole = ran.tokens["a"]
        assert len(whole) == 40
        assert set(whole) <= listed.get("allowed_token_ids", set(whole))
        words = {tuple(whole[at : at + length]) for at in range(40) for length in (1, 2)}
        assert not words & set(listed.get("bad_words", ()))
        assert ran.tokens["b"] == plain
        answers.append(whole)
    another = engine_of(Size(pages=16))
    for listed, whole in zip(LISTED, answers, strict=True):
        moved = run(another, ask("a", epoch=2, delivered=tuple(whole[:7]), **listed))
        assert moved.tokens["a"] == whole[7:]


def test_a_masked_sequence_that_was_parked_goes_on_with_the_same_tokens(engine_of):
    if "masks" in engine_of.lacks:
        return
    asked = engine_of.ask("a", **LISTED[2])
    whole = run(engine_of(Size()), asked).tokens["a"]
    engine = engine_of(Size())
    engine.set_supervised(True)
    ran = run(engine, asked, steps=10)
    promise = book_of(engine)["a"].promise
    assert engine.park(R("a"), 1, promise, promise, ParkMethod.RECOMPUTE)
    run(engine, ran=ran)
    assert engine.resume(R("a"), 1, promise)
    run(engine, ran=ran)
    assert ran.tokens["a"] == whole


def test_an_answer_for_which_no_token_is_left_ends_alone(engine_of):
    if "masks" in engine_of.lacks:
        return
    dead = ask("a", allowed_token_ids=frozenset({100, 101}), bad_words=((100, 101), (101, 100), (100, 100), (101, 101)))
    ran = run(engine_of(Size(pages=16)), dead, ask("b"))
    assert isinstance(ran.last["a"].error, InvalidRequest)
    assert len(ran.tokens["a"]) == 1
    assert len(ran.tokens["b"]) == 40


PENALTIES = [{"presence_penalty": 2.0}, {"frequency_penalty": 1.5}, {"frequency_penalty": -2.0}]


def test_penalties_count_what_another_engine_has_delivered(engine_of):
    engine = engine_of(Size())
    answers = [run(engine, ask(f"a{n}", **one)).tokens[f"a{n}"] for n, one in enumerate(PENALTIES)]
    another = engine_of(Size())
    for n, (penalties, whole) in enumerate(zip(PENALTIES, answers, strict=True)):
        moved = run(another, ask(f"a{n}", epoch=2, delivered=tuple(whole[:17]), **penalties))
        assert moved.tokens[f"a{n}"] == whole[17:]


# ------------------------------------------------------------------------------------------------------------- proofs


def test_an_engine_that_proves_does_so_before_it_serves_and_others_serve_as_they_are(engine_of, layout):
    engine = engine_of(Size(pages=32))
    engine.load_adapter(A, layout, proof=ProofOrder(1))
    ran = run(engine, ask("a", adapter=A))
    assert len(ran.tokens["a"]) == 40
    (ended,) = ran.of(ProofEnded)
    assert (ended.number, ended.digest) == (1, A)
    assert isinstance(ended.found, Proof if engine.info.proves else MotetError)
    if engine.info.proves:
        assert ran.events.index(ended) < ran.events.index(StateChanged(R("a"), 1, State.PREFILL))
        assert ended.found.kernels == engine.report().kernels.serving
    assert engine.info.proves == ("proofs" not in engine_of.lacks)


def test_each_order_for_a_proof_is_answered_once(engine_of, layout):
    engine = engine_of(Size(pages=32))
    engine.load_adapter(A, layout, proof=ProofOrder(1))
    engine.load_adapter(A, layout, proof=ProofOrder(2))
    engine.load_adapter(B, layout, proof=ProofOrder(3))
    engine.drop_adapter(B)
    ran = run(engine)
    engine.load_adapter(A, layout, proof=ProofOrder(4, serves_meanwhile=True))
    run(engine, ask("a", adapter=A), ran=ran)
    assert sorted(ended.number for ended in ran.of(ProofEnded)) == [1, 2, 3, 4]
    right = {ended.number for ended in ran.of(ProofEnded) if isinstance(ended.found, Proof)}
    assert right == ({2, 4} if engine.info.proves else set())
    assert len(ran.of(AdapterLoaded)) <= 2


def test_an_adapter_that_is_to_be_proved_loads_though_nobody_waits_and_slots_are_taken(engine_of, layout):
    engine = engine_of(Size(pages=32, slots=1))
    engine.load_adapter(A, layout)
    run(engine)
    engine.load_adapter(B, layout, proof=ProofOrder(1))
    ran = run(engine)
    assert on_device(engine) == ({B} if engine.info.proves else {A})
    assert len(ran.of(ProofEnded)) == 1
    assert not engine.has_work()
