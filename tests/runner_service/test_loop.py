"""The loop around an engine, and the pipe between service and engine, without processes."""

import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.api.v1 import common_pb2, runner_pb2
from motet.clock import FakeClock, monotonic
from motet.domain import BASE, PAGE_TOKENS, Digest, ParkMethod, RequestId, pages_for
from motet.errors import AdapterUnproved, InvalidRequest, Overloaded, StructuredOutputUnavailable
from motet.grammars.grammar import Grammar, GrammarForm
from motet_runner import engine_loop
from motet_runner import pipe as pipes
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.adapters.proof import ProofOrder
from motet_runner.engine_loop import UNPRODUCTIVE_WAIT_SECONDS, EngineLoop
from motet_runner.engine_messages import (
    Add,
    Cancel,
    DropAdapter,
    EngineOutputs,
    Extend,
    LoadAdapter,
    Park,
    ReportNow,
    Resume,
    SetOvercommit,
)
from motet_runner.engine_process import drive
from motet_runner.free_levels import CHECK_SECONDS
from motet_runner.grammar_thread import CompileThread
from motet_runner.interface import (
    AdapterEvicted,
    AdapterFailed,
    AdapterLoaded,
    Finish,
    NewSequence,
    OrderRefused,
    OverflowAhead,
    ProofEnded,
    Sampling,
)
from motet_runner.pipe import Pipe
from motet_simulator.fake_engine import FakeEngine, tokens_of

PROMPT = (1, 2, 3)


def add(request, *, epoch=1, stream=1, max_tokens=6, delivered=(), received=0.0):
    return Add(
        NewSequence(
            request=request,
            epoch=epoch,
            prompt=PROMPT,
            delivered=tuple(delivered),
            promise=pages_for(len(PROMPT) + max_tokens, PAGE_TOKENS),
            sampling=Sampling(max_tokens=max_tokens),
        ),
        stream,
        received,
    )


def sequences(batch, stream=1):
    return list(runner_pb2.GenerateDown.FromString(batch.steps[stream]).step.sequences)


@pytest.mark.parametrize("first_life", ["it runs", "cancelled", "at its end", "refused by an adapter", "a defect"])
@pytest.mark.parametrize("epoch", [1, 2])
def test_an_order_for_a_placements_first_life_is_void_in_its_second(epoch, first_life):
    """A gateway that lost its stream submits its placements again on the next one, with what has been delivered."""
    loop = EngineLoop(engine := FakeEngine(adapter_pages=1000), clock=monotonic)

    def placed(max_tokens=200, adapter=BASE, **how):
        command = add("a", max_tokens=max_tokens, **how)
        return replace(command, sequence=replace(command.sequence, promise=2, adapter=adapter))

    tokens = 20 if first_life == "at its end" else 200
    loop.apply([placed(tokens, "x" if first_life == "refused by an adapter" else BASE)])
    (first,) = engine.report().sequences
    loop.turn()
    orders = [
        Extend("a", epoch, first.promise, 2 * first.promise, first.promise_number),
        Park("a", epoch, first.promise, first.promise, ParkMethod.RECOMPUTE, first.promise_number),
    ]
    match first_life:
        case "cancelled":  # as the service does when the engine has it
            loop.apply([Cancel("a", 1, 1, 0.0)])
        case "at its end":
            for _ in range(tokens):
                loop.turn()
        case "refused by an adapter":
            loop.apply([LoadAdapter("x", AdapterLayout.of(Path("x"), FileStamp(0, 0, 0), 1, ()))])
            loop.turn()
        case "a defect":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine, "resume", broken)
                loop.apply([Resume("a", 1, 2, first.promise_number)])
    assert bool(engine.report().sequences) == (first_life == "it runs")
    loop.apply([placed(delivered=tokens_of(PROMPT, 0, 1), stream=2, epoch=epoch), *orders])
    (second,) = engine.report().sequences
    assert (second.promise, second.parked_times, second.epoch) == (first.promise, 0, epoch)
    assert second.promise_number > first.promise_number
    refused = [one for one in loop.take().events if isinstance(one, OrderRefused)]
    assert [one.number for one in refused] == [first.promise_number] * 2
    loop.apply([replace(orders[0], number=second.promise_number)])
    assert engine.report().sequences[0].promise == 2 * first.promise, "an order for the promise of now counts"


def test_the_numbers_of_those_that_ended_last_are_known(monkeypatch):
    monkeypatch.setattr(engine_loop, "ENDED_REMEMBERED", 2)
    loop = EngineLoop(engine := FakeEngine(), clock=monotonic)
    for name in ("a", "b", "a", "c", "d"):
        loop.apply([add(name, max_tokens=1)])
        assert loop.turn().ended
    loop.apply([add(name) for name in ("a", "b", "c", "d")])
    assert {one.request: one.promise_number for one in engine.report().sequences} == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_an_idle_loop_sends_nothing_and_waits():
    loop = EngineLoop(FakeEngine(), clock=monotonic)
    assert loop.turn() is None
    assert loop.command_wait_seconds() is None


class PreparingEngine(FakeEngine):
    """It wants three moments without work, the second one later."""

    moments = 0

    def idle(self):
        self.moments += 1
        return {1: 0.0, 2: 0.25}.get(self.moments)


def test_an_engine_without_work_gets_the_moments_that_it_wants_and_none_beside_work():
    engine = PreparingEngine()
    loop = EngineLoop(engine, clock=monotonic)
    assert loop.command_wait_seconds() == 0, "the first one at once"
    waits = []
    for _ in range(2):
        assert loop.turn() is None
        waits.append(loop.command_wait_seconds())
    assert waits == [0, 0.25]
    loop.apply([add("a", max_tokens=2)])
    while engine.has_work():
        loop.turn()
    assert engine.moments == 2
    assert loop.command_wait_seconds() == 0, "the next one at once, or requests that come often would prevent it"
    loop.turn()
    assert (engine.moments, loop.command_wait_seconds()) == (3, None)


class GrammarEngine(FakeEngine):
    """It compiles when the test lets it."""

    def __init__(self):
        super().__init__()
        self.may_compile = threading.Event()
        self.compiled_by = None

    def mask_of(self, sequence):
        self.compiled_by = threading.current_thread()
        assert self.may_compile.wait(20)
        if sequence.grammar.text == "(":
            raise InvalidRequest("unclosed", param="response_format")
        return AnyToken()


class AnyToken:
    failure = None

    def take(self, token, place):
        return True

    def allowed(self):
        return b""


def with_grammar(request, text="a", epoch=1):
    command = add(request, max_tokens=2)
    grammar = Grammar(GrammarForm.REGEX, text)
    return replace(command, sequence=replace(command.sequence, grammar=grammar, epoch=epoch))


def eventually(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def turns_until(loop, arrived):
    for _ in range(2000):
        batch = loop.turn()
        if batch is not None and arrived(batch):
            return batch
        time.sleep(0.005)
    raise TimeoutError


def test_only_the_request_waits_for_its_grammar():
    engine = GrammarEngine()
    loop = EngineLoop(engine, clock=monotonic, grammars=CompileThread(engine.mask_of))
    loop.apply([with_grammar("a"), add("b", max_tokens=3)])
    ended = [one.request for _ in range(3) for one in loop.turn().ended]
    assert ended == ["b"]
    assert loop.command_wait_seconds() == UNPRODUCTIVE_WAIT_SECONDS, "it looks again soon"
    engine.may_compile.set()
    batch = turns_until(loop, lambda batch: batch.ended)
    assert [one.request for one in batch.ended] == ["a"]
    assert engine.compiled_by is not threading.current_thread()
    loop.turn()
    assert loop.command_wait_seconds() is None


def test_a_grammar_that_cannot_be_served_ends_its_own_request():
    engine = GrammarEngine()
    engine.may_compile.set()
    loop = EngineLoop(engine, clock=monotonic, grammars=CompileThread(engine.mask_of))
    loop.apply([with_grammar("a", "("), with_grammar("b")])
    batch = turns_until(loop, lambda batch: batch.refused)
    assert [(one.request, one.error.message) for one in batch.refused] == [("a", "unclosed")]
    turns_until(loop, lambda batch: batch.ended)
    loop.apply([with_grammar("a")])
    assert [one.request for one in turns_until(loop, lambda batch: batch.ended).ended] == ["a"]


def test_a_defect_that_comes_up_when_a_grammar_is_done_ends_its_own_request(monkeypatch):
    engine = GrammarEngine()
    engine.may_compile.set()
    loop = EngineLoop(engine, clock=monotonic, grammars=CompileThread(engine.mask_of))
    with monkeypatch.context() as patched:
        patched.setattr(engine, "add", {}.__getitem__)
        loop.apply([with_grammar("a")])
        batch = turns_until(loop, lambda batch: batch.refused)
    assert [one.request for one in batch.refused] == ["a"]
    loop.apply([with_grammar("a")])
    assert [one.request for one in turns_until(loop, lambda batch: batch.ended).ended] == ["a"]


def test_a_request_that_is_cancelled_or_placed_again_while_its_grammar_is_compiled():
    engine = GrammarEngine()
    loop = EngineLoop(engine, clock=monotonic, grammars=CompileThread(engine.mask_of))
    loop.apply([with_grammar("a"), with_grammar("b")])
    loop.apply([Cancel("a", 1, 1, time.monotonic()), with_grammar("b", epoch=2)])
    batch = loop.turn()
    assert [(one.request, one.epoch) for one in batch.ended] == [("a", 1), ("b", 1)]
    engine.may_compile.set()
    batch = turns_until(loop, lambda batch: batch.ended)
    assert [(one.request, one.epoch) for one in batch.ended] == [("b", 2)]


def test_tenants_take_turns_to_have_their_grammars_compiled():
    engine, begun = GrammarEngine(), []
    compile_one = engine.mask_of

    def mask_of(sequence):
        begun.append(sequence.request)
        return compile_one(sequence)

    loop = EngineLoop(engine, clock=monotonic, grammars=CompileThread(mask_of))
    loop.apply([of_tenant(with_grammar(name), "busy") for name in ("a", "b", "c", "d")])
    loop.apply([Cancel("b", 1, 1, time.monotonic()), of_tenant(with_grammar("x"), "other")])
    engine.may_compile.set()
    ended = [one.request for one in turns_until(loop, lambda batch: batch.ended).ended]
    while len(ended) < 5:
        ended += [one.request for one in turns_until(loop, lambda batch: batch.ended).ended]
    assert begun == ["a", "x", "c", "d"]
    assert sorted(ended) == ["a", "b", "c", "d", "x"]


def test_a_tenant_that_comes_while_another_ones_grammar_is_compiled_waits_for_that_one_alone():
    begun, begins, may_end = [], threading.Semaphore(0), threading.Semaphore(0)

    def mask_of(sequence):
        begun.append(sequence.request)
        begins.release()
        assert may_end.acquire(timeout=20)
        return AnyToken()

    grammars = CompileThread(mask_of)
    for name in ("a", "b", "c"):
        grammars.begin(of_tenant(with_grammar(name), "busy"))
    assert begins.acquire(timeout=20)
    grammars.begin(of_tenant(with_grammar("x"), "other"))
    grammars.begin(of_tenant(with_grammar("d"), "busy"))
    may_end.release(5)
    for _ in range(4):
        assert begins.acquire(timeout=20)
    assert begun == ["a", "x", "b", "c", "d"]


def test_what_is_cancelled_after_it_was_compiled_is_not_kept():
    engine, masks = GrammarEngine(), weakref.WeakSet()

    def mask_of(_sequence):
        masks.add(mask := AnyToken())
        return mask

    loop = EngineLoop(engine, clock=monotonic, grammars=CompileThread(mask_of))
    loop.apply([with_grammar("a"), with_grammar("b")])
    eventually(lambda: len(masks) == 2)
    loop.apply([Cancel(name, 1, 1, time.monotonic()) for name in ("a", "b")])

    def none_left():
        loop.turn()
        return not masks

    eventually(none_left)
    assert loop.command_wait_seconds() is None


def test_a_grammar_that_is_cancelled_before_its_turn_takes_none():
    begun, begins, may_end = [], threading.Semaphore(0), threading.Event()

    def mask_of(sequence):
        begun.append(sequence.request)
        begins.release()
        assert may_end.wait(20)
        return AnyToken()

    grammars = CompileThread(mask_of)
    for name, tenant in (("a", "busy"), ("b", "busy"), ("x", "other"), ("y", "other"), ("gone", "gone")):
        grammars.begin(of_tenant(with_grammar(name), tenant))
    assert begins.acquire(timeout=20)
    grammars.forget("x")
    grammars.forget("gone")
    grammars.begin(of_tenant(with_grammar("z"), "third"))
    may_end.set()
    for _ in range(3):
        assert begins.acquire(timeout=20)
    assert begun == ["a", "y", "z", "b"]


def test_what_is_cancelled_before_its_turn_is_not_kept():
    """With its prompt and its grammar, while another one is compiled."""
    begins, may_end = threading.Semaphore(0), threading.Event()

    def mask_of(_sequence):
        begins.release()
        assert may_end.wait(20)
        return AnyToken()

    class Text(str):
        __slots__ = ("__weakref__",)

    grammars, texts = CompileThread(mask_of), []
    grammars.begin(with_grammar("slow"))
    assert begins.acquire(timeout=20)
    for number in range(100):
        texts.append(weakref.ref(text := Text("a")))
        grammars.begin(with_grammar(f"a{number}", text))
        grammars.forget(f"a{number}")
        del text
    kept = sum(text() is not None for text in texts)
    may_end.set()
    assert kept <= 1


def test_a_turn_does_not_look_at_each_request_that_waits_for_its_grammar():
    engine = GrammarEngine()
    grammars = CompileThread(engine.mask_of)
    loop = EngineLoop(engine, clock=monotonic, grammars=grammars)
    loop.apply([with_grammar(f"a{number}") for number in range(1000)])
    calls = []
    sys.setprofile(lambda _frame, event, _argument: calls.append(event))
    try:
        loop.turn()
        loop.apply([Cancel("a500", 1, 1, time.monotonic())])
    finally:
        sys.setprofile(None)
        engine.may_compile.set()
    assert len(grammars) == 999
    assert len(calls) < 500


def of_tenant(command, tenant):
    return replace(command, sequence=replace(command.sequence, tenant=tenant))


def test_an_engine_without_grammars_refuses_them():
    loop = EngineLoop(FakeEngine(), clock=monotonic)
    loop.apply([with_grammar("a")])
    assert isinstance(loop.turn().refused[0].error, StructuredOutputUnavailable)


def test_a_report_comes_when_it_is_asked_for():
    loop = EngineLoop(FakeEngine(), clock=monotonic)
    loop.apply([ReportNow()])
    assert loop.turn().report.pages_free == 256
    assert loop.turn() is None


class CountingEngine(FakeEngine):
    reports = 0

    def report(self):
        self.reports += 1
        return super().report()


def test_a_report_is_made_and_sent_only_when_the_free_pages_cross_a_level():
    engine, clock = CountingEngine(pages=10), FakeClock()
    loop = EngineLoop(engine, clock=clock)
    loop.apply([add("a", max_tokens=128)])  # nine pages
    sent = []
    while engine.has_work():
        clock.advance(CHECK_SECONDS)
        batch = loop.turn()
        if batch.report is not None:
            sent.append(batch.report.pages_free)
    assert sent == [4, 2, 10], "below a half, below a quarter, and all of them at the end"
    assert engine.reports == len(sent)


def test_no_report_comes_with_an_overflow_or_with_an_adapter_that_comes_and_goes():
    """Each report lists all requests and adapters, and these happen all the time."""
    engine = CountingEngine(adapter_slots=1)
    engine.set_supervised(True)
    loop = EngineLoop(engine, clock=FakeClock())

    def tight(name):
        command = add(name, max_tokens=100)
        return replace(command, sequence=replace(command.sequence, adapter=Digest(name), promise=1))

    seen = set()
    for name in ("x", "y"):
        loop.apply(
            [LoadAdapter(Digest(name), AdapterLayout.of(Path("nowhere"), FileStamp(0, 0, 0), 8, ())), tight(name)]
        )
        while engine.has_work():
            batch = loop.turn()
            seen |= {type(event) for event in batch.events} if batch is not None else set()
            loop.apply([Extend(RequestId(name), 1, 1, 9)])
    assert seen >= {OverflowAhead, AdapterLoaded, AdapterEvicted}
    assert engine.reports == 0
    loop.apply([tight("y"), Park(RequestId("y"), 1, 1, 2, ParkMethod.RECOMPUTE)])
    loop.turn()
    assert engine.reports == 1, "a park frees pages, which others wait for"


def test_the_free_pages_are_compared_with_those_that_kv_can_have_now():
    engine, clock = FakeEngine(pages=10), FakeClock()
    loop = EngineLoop(engine, clock=clock)
    engine.ledger.capacity = 8
    loop.apply([add("a", max_tokens=110)])  # seven pages
    sent = []
    while not sent:
        clock.advance(CHECK_SECONDS)
        batch = loop.turn()
        sent += [batch.report.pages_free] if batch.report is not None else []
    assert sent == [3], "below a half of 8"


def test_each_stream_gets_one_message_a_turn():
    loop = EngineLoop(FakeEngine(), clock=monotonic)
    loop.apply([add("a", stream=1), add("b", stream=1), add("c", stream=2)])
    batch = loop.turn()
    assert [one.request for one in sequences(batch, 1)] == ["a", "b"]
    assert [one.request for one in sequences(batch, 2)] == ["c"]
    assert batch.generated == 3


def test_a_cancel_takes_effect_before_the_next_iteration():
    engine = FakeEngine()
    loop = EngineLoop(engine, clock=monotonic)
    loop.apply([add("a", max_tokens=50)])
    loop.turn()
    loop.apply([Cancel("a", 1, 1, time.monotonic())])
    assert engine.report().pages_free == 256
    batch = loop.turn()
    (last,) = sequences(batch)
    assert (last.finish, last.index, list(last.tokens)) == (common_pb2.FINISH_REASON_CANCELLED, 1, [])
    assert [(one.finish, one.output_tokens) for one in batch.ended] == [(Finish.CANCELLED, 1)]
    assert len(batch.cancel_seconds) == 1


def test_a_cancel_of_what_is_not_there_says_so_and_does_nothing():
    loop = EngineLoop(FakeEngine(), clock=monotonic)
    unknown = Cancel("b", 1, 1, 0.0)
    loop.apply([unknown])
    assert loop.turn().unknown == [unknown]
    other_epoch = Cancel("a", 1, 1, 0.0)
    loop.apply([add("a", epoch=2), other_epoch])
    batch = loop.turn()
    assert (batch.unknown, batch.ended) == ([other_epoch], [])


def test_an_older_epoch_is_refused():
    loop = EngineLoop(FakeEngine(), clock=monotonic)
    loop.apply([add("a", epoch=2), add("a", epoch=1)])
    (refused,) = loop.turn().refused
    assert (refused.epoch, refused.error.code) == (1, "declined")


def broken(*_args):
    raise KeyError("a defect")


def engine_with_a_defect(method):
    engine = FakeEngine()
    setattr(engine, method, broken)
    return engine


def ends_of(batch):
    return [(one.request, one.index, one.finish, one.failure.code) for one in sequences(batch) if one.finish]


@pytest.mark.parametrize(
    ("method", "command"),
    [
        ("extend", Extend("a", 1, 4, 5)),
        ("park", Park("a", 1, 4, 5, ParkMethod.RECOMPUTE)),
        ("resume", Resume("a", 1, 4)),
    ],
)
def test_an_error_that_nobody_expected_ends_only_the_request_of_its_command(method, command):
    engine = engine_with_a_defect(method)
    loop = EngineLoop(engine, clock=monotonic)
    loop.apply([add("a", max_tokens=60), add("b", max_tokens=3)])
    loop.turn()
    loop.apply([command])
    batch = loop.turn()
    assert ends_of(batch) == [("a", 1, common_pb2.FINISH_REASON_FAILED, "internal_error")]
    assert [(one.request, one.finish, one.output_tokens) for one in batch.ended] == [("a", Finish.FAILED, 1)]
    assert ends_of(loop.turn()) == [("b", 2, common_pb2.FINISH_REASON_LENGTH, "")]
    assert engine.report().pages_free == 256


@pytest.mark.parametrize(
    "command",
    [
        Extend("a", 1, 4, 5, number=7),
        Park("a", 1, 4, 5, ParkMethod.RECOMPUTE, number=7),
        Resume("a", 1, 4, number=7),
        Resume("gone", 1, 4, number=7),
    ],
)
def test_a_command_that_changes_nothing_is_refused_by_its_number(command):
    loop = EngineLoop(FakeEngine(), clock=monotonic)
    loop.apply([add("a", max_tokens=60), command])
    events = loop.turn().events
    assert [one for one in events if isinstance(one, OrderRefused)] == [OrderRefused(command.request, 1, 7)]


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "with cached pages"])
def test_an_error_that_nobody_expected_refuses_only_the_request_that_comes(shared, monkeypatch):
    engine = FakeEngine()
    loop = EngineLoop(engine, clock=monotonic)
    new = NewSequence(
        request="first",
        epoch=1,
        prompt=tuple(range(40)),
        promise=pages_for(60, PAGE_TOKENS),
        sampling=Sampling(max_tokens=2),
        prefix_salt=b"tenant" if shared else b"",
    )
    loop.apply([Add(new, 1, monotonic()), add("b", max_tokens=9)])
    while "first" in {one.request for one in engine.report().sequences}:
        loop.turn()
    monkeypatch.setattr(engine.ledger, "promise", broken)
    loop.apply([Add(replace(new, request="second"), 1, monotonic())])
    monkeypatch.undo()
    engine.check()
    batch = loop.turn()
    assert [(one.request, one.error.code) for one in batch.refused] == [("second", "internal_error")]
    assert [one.request for one in sequences(batch)] == ["b"]
    loop.apply([Add(replace(new, request="second"), 1, monotonic())])
    assert {one.request for one in sequences(loop.turn())} == {"b", "second"}, "its next placement is taken"


def test_an_error_that_nobody_expected_in_the_middle_of_an_arrival_leaves_nothing_behind(monkeypatch):
    engine = FakeEngine()
    loop = EngineLoop(engine, clock=monotonic)
    monkeypatch.setattr(engine.planner.memory, "announce_overflow", broken)
    loop.apply([add("a")])
    monkeypatch.undo()
    assert [one.request for one in loop.turn().refused] == ["a"]
    assert not engine.has_work()
    assert engine.report().pages_free == 256


def test_an_adapter_of_which_the_engine_fails_to_hear_is_reported_as_failed():
    loop = EngineLoop(engine_with_a_defect("load_adapter"), clock=monotonic)
    layout = AdapterLayout.of(Path("x"), FileStamp(0, 0, 0), 1, ())
    loop.apply([LoadAdapter("x", layout, ProofOrder(7)), add("b", max_tokens=1)])
    batch = loop.turn()
    proof, failed = (one for one in batch.events if isinstance(one, ProofEnded | AdapterFailed))
    assert (proof.number, proof.found.code) == (7, "internal_error"), "an order to prove it is answered first"
    assert (failed.digest, failed.error.code) == ("x", "internal_error")
    assert ends_of(batch) == [("b", 0, common_pb2.FINISH_REASON_LENGTH, "")]


def test_an_order_to_prove_is_answered_also_if_the_engine_refuses_the_command(monkeypatch):
    def refuses(*_, **__):
        raise Overloaded("no room")

    engine = FakeEngine()
    monkeypatch.setattr(engine, "load_adapter", refuses)
    loop = EngineLoop(engine, clock=monotonic)
    layout = AdapterLayout.of(Path("x"), FileStamp(0, 0, 0), 1, ())
    loop.apply([LoadAdapter("x", layout), LoadAdapter("y", layout, ProofOrder(8))])
    (event,) = loop.turn().events
    assert (event.number, event.digest, event.found.code) == (8, "y", "overloaded")


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_whose_adapter_is_not_proved_is_declined_unless_its_client_has_tokens(begun):
    """Another runner may compute right what this one does not."""
    engine = FakeEngine()
    loop = EngineLoop(engine, clock=monotonic)
    loop.apply([add("a"), add("b", max_tokens=1)])
    if begun:
        loop.turn()
    unproved = AdapterUnproved("wrong", reason="ProofFailed")
    engine.planner._lives.give_up(engine.planner.sequences.get("a"), unproved)  # noqa: SLF001 - as a failed proof does
    batch = turns_until(loop, lambda batch: batch.refused or any(one.request == "a" for one in batch.ended))
    if begun:
        assert ("a", 1, common_pb2.FINISH_REASON_FAILED, "adapter_unproved") in ends_of(batch)
    else:
        assert [(one.request, one.error) for one in batch.refused] == [("a", unproved)]
        assert not any(one.request == "a" for one in batch.ended)
    loop.apply([add("a", epoch=2)])
    assert loop.turn() is not None
    assert not loop._batch.refused  # noqa: SLF001


@pytest.mark.parametrize(
    ("method", "command"), [("set_overcommit", SetOvercommit(1.0)), ("drop_adapter", DropAdapter("x"))]
)
def test_an_error_that_nobody_expected_in_an_order_of_no_request_ends_no_request(method, command):
    loop = EngineLoop(engine_with_a_defect(method), clock=monotonic)
    loop.apply([command, add("b", max_tokens=1)])
    assert ends_of(loop.turn()) == [("b", 0, common_pb2.FINISH_REASON_LENGTH, "")]


def test_a_request_that_cannot_be_cancelled_ends_the_engine():
    """Its pages would be lost for ever."""
    loop = EngineLoop(engine_with_a_defect("cancel"), clock=monotonic)
    loop.apply([add("a", max_tokens=50)])
    loop.turn()
    with pytest.raises(KeyError, match="a defect"):
        loop.apply([Cancel("a", 1, 1, time.monotonic())])


COMMANDS = st.lists(
    st.tuples(st.sampled_from(["add", "cancel", "turn", "turn"]), st.sampled_from("abcd"), st.integers(1, 4)),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(COMMANDS)
def test_after_any_messages_every_placement_ends_once_and_misses_no_token(commands):
    engine = FakeEngine(pages=12, max_sequences=3)
    loop = EngineLoop(engine, clock=monotonic)
    tokens, brought, added, closed = {}, set(), 0, 0

    def take(batch):
        nonlocal closed
        if batch is None:
            return
        for one in sequences(batch) if batch.steps else ():
            key = (one.request, one.epoch)
            got = tokens.setdefault(key, [])
            assert one.index == len(got)
            got.extend(one.tokens)
            if one.finish:
                assert got == tokens_of(PROMPT, 0, len(got))
                del tokens[key]  # its gateway may submit it again
        closed += len(batch.refused) + len(batch.ended)

    for what, request, epoch in commands:
        match what:
            case "add":
                added += 1
                if (request, epoch) in brought:
                    # A gateway brings the same placement again only on another stream, which hears nothing of the
                    # first; here there is one stream, so what was said of the first has to be out before.
                    take(loop.turn())
                    tokens.pop((request, epoch), None)
                brought.add((request, epoch))
                loop.apply([add(request, epoch=epoch)])
            case "cancel":
                loop.apply([Cancel(request, epoch, 1, 0.0)])
            case _:
                take(loop.turn())
    while (batch := loop.turn()) is not None:
        take(batch)
    assert closed == added
    assert engine.report().pages_free == 12
    assert not engine.report().sequences
    assert engine.ledger.promised == 0


def test_a_pipe_never_blocks_and_loses_nothing():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one, two = Pipe(ours), Pipe(theirs)
        messages = [b"x" * (300_000 + n) for n in range(5)]
        for message in messages:
            one.send(message)  # far more than the socket's buffer holds, and the other end does not read
        got = []
        while len(got) < len(messages):
            one.exchange(0)
            got += two.exchange(0)
        assert got == messages


class MeteredPipe(Pipe):
    """Notes the most that ever waited, and when the engine begins to wait for its service."""

    def __init__(self, connection):
        super().__init__(connection)
        self.most = 0
        self.rests = threading.Event()

    def send(self, message):
        super().send(message)
        self.most = max(self.most, len(self._out))

    def flush(self):
        self.rests.set()
        super().flush()


def test_an_engine_rests_while_its_service_stands_still_and_then_loses_nothing(monkeypatch):
    monkeypatch.setattr(pipes, "MAX_WAITING_BYTES", 1 << 14)
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    with ours, theirs:
        service, engines_end = Pipe(ours), MeteredPipe(theirs)

        def run():
            with suppress(EOFError):
                drive(FakeEngine, engines_end)

        engine = threading.Thread(target=run, daemon=True)
        count = 1500
        service.send(add("a", max_tokens=count))
        engine.start()
        assert engines_end.rests.wait(20), f"{engines_end.most} bytes wait, and the engine goes on"
        got = []
        while len(got) < count:
            messages = [one for one in service.exchange(None) if isinstance(one, EngineOutputs)]
            got += [token for one in messages if 1 in one.steps for part in sequences(one) for token in part.tokens]
        assert got == tokens_of(PROMPT, 0, count)
        assert engines_end.most < 2 * pipes.MAX_WAITING_BYTES
        ours.shutdown(socket.SHUT_RDWR)
        engine.join(20)


def test_a_pipe_says_when_the_other_end_has_gone():
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(EOFError):
            Pipe(ours).exchange(None)
