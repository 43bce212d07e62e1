"""A mask that comes late delays only its own row, and changes no token: neither its row's nor a neighbour's."""

import os
import random
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from motet.clock import monotonic
from motet.domain import ParkMethod, RequestId
from motet.errors import InvalidRequest
from motet.grammars.compiler import Grammars
from motet.grammars.grammar import Grammar, GrammarForm
from motet_runner import mask_threads
from motet_runner.engine import Engine
from motet_runner.engine_loop import EngineLoop
from motet_runner.interface import NewSequence, Sampling
from motet_runner.mask_threads import MAX_THREADS, NICENESS, MaskThreads
from motet_runner.row_mask import MASKS_OF_MISTRUST, RowMask, TokenRules
from testbed.tree import ROOT
from tests.runner.engines import EngineRun, ask, make_engine, run

MODEL = ROOT / "cli" / "motet_cli" / "bundled" / "model"
JSON = Grammar(
    GrammarForm.JSON_SCHEMA,
    '{"type":"object","properties":{"name":{"type":"string","maxLength":9},"age":{"type":"integer","maximum":99},'
    '"sea":{"type":"boolean"}},"required":["name","age","sea"],"additionalProperties":false}',
)
WORD = Grammar(GrammarForm.REGEX, "(yes|no|perhaps)[.!]")


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    info = make_engine(MODEL).info
    return Grammars(MODEL / "tokenizer.json", info.vocabulary, info.eos_token_ids)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread waits for no mask while other rows run."""
    monkeypatch.setattr(mask_threads, "MAX_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(mask_threads, "MAX_WAIT_SHARE", 0.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "MAX_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(mask_threads, "MAX_WAITS_SECONDS", 60.0)


class Slow:
    """Some masks take a few iterations. It also fails if two threads use the rules at once."""

    def __init__(self, rules: TokenRules, seed: int) -> None:
        self._rules, self._chance = rules, random.Random(seed)
        self._free = threading.Lock()
        self.masks = 0

    def take(self, token: int, place: int) -> bool:
        assert self._free.acquire(blocking=False)
        with_lock = self._rules.take(token, place)
        self._free.release()
        return with_lock

    def allowed(self) -> bytes:
        assert self._free.acquire(blocking=False)
        time.sleep(self._chance.choice((0, 0, 0.003, 0.02)))
        self.masks += 1
        bits = self._rules.allowed()
        self._free.release()
        return bits

    @property
    def failure(self) -> InvalidRequest | None:
        return self._rules.failure


class Held(Slow):
    """A mask takes until it is let go."""

    def __init__(self, rules: TokenRules) -> None:
        super().__init__(rules, 0)
        self.go = threading.Event()

    def allowed(self) -> bytes:
        assert self.go.wait(10)
        return self._rules.allowed()


def masked(grammars: Grammars, grammar: Grammar, name: str = "a", *, slow: bool = True, **changed) -> NewSequence:
    rules: TokenRules = grammars.mask(grammar, ())
    return following(Slow(rules, len(name)) if slow else rules, name, **changed)


def following(rules: TokenRules, name: str = "a", **changed) -> NewSequence:
    seed = changed.pop("seed", 0)
    return NewSequence(
        request=RequestId(name),
        epoch=1,
        prompt=tuple(range(20, 20 + changed.pop("prompt", 40))),
        promise=12,
        sampling=Sampling(**({"max_tokens": 60} | changed)),
        seed=seed,
        mask=RowMask(rules),
    )


def runs(engine: Engine, *asked: NewSequence) -> tuple[dict[str, list[int]], int]:
    """Also in how many iterations a row was late."""
    ran, late = EngineRun(), 0
    for one in asked:
        engine.add(one)
    while engine.has_work():
        ran.take(engine)
        engine.check()
        late += bool(engine.planner.sequences.late)
    return ran.tokens, late


@pytest.mark.parametrize(
    ("drawn", "kernels"),
    [
        ("greedy", "torch"),
        ("drawn", "cpp"),
        ("drawn", "exact"),
        pytest.param("greedy", "cpp", marks=pytest.mark.soak),
        pytest.param("greedy", "exact", marks=pytest.mark.soak),
        pytest.param("drawn", "torch", marks=pytest.mark.soak),
    ],
)
def test_tokens_are_those_of_masks_in_time(
    grammars: Grammars, kernels: str, drawn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"temperature": 1.2, "seed": 5} if drawn == "drawn" else {}

    def asked(*, slow: bool) -> list[NewSequence]:
        return [
            masked(grammars, JSON, "a", slow=slow, **how),
            masked(grammars, WORD, "bb", slow=slow, prompt=17, **how),
            masked(grammars, JSON, "ccc", slow=slow, prompt=33, temperature=0.8, seed=3),
            ask("plain", max_tokens=50),
            ask("other", max_tokens=50, temperature=1.0, seed=9),
        ]

    monkeypatch.setattr(mask_threads, "MAX_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(mask_threads, "MAX_WAITS_SECONDS", 60.0)
    expected, none_late = runs(make_engine(MODEL, kernels=kernels, dtype="float32"), *asked(slow=False))
    assert not none_late
    monkeypatch.setattr(mask_threads, "MAX_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(mask_threads, "MAX_WAIT_SHARE", 0.0)
    found, late = runs(make_engine(MODEL, kernels=kernels, dtype="float32"), *asked(slow=True))
    assert late > 5
    assert found == expected


@pytest.mark.usefixtures("impatient")
def test_others_go_on_while_a_mask_is_late(grammars: Grammars) -> None:
    rules = Held(grammars.mask(WORD, ()))
    engine, ran = make_engine(MODEL), EngineRun()
    engine.add(following(rules))
    engine.add(ask("plain", max_tokens=60))
    while "plain" not in ran.last or ran.last["plain"].finish is None:
        ran.take(engine)
    assert len(ran.tokens["plain"]) == 60
    assert "a" not in ran.tokens
    assert engine.has_work()
    rules.go.set()
    while engine.has_work():
        ran.take(engine)
    assert ran.tokens["a"] == run(make_engine(MODEL), masked(grammars, WORD, slow=False)).tokens["a"]


@pytest.fixture
def held(grammars: Grammars, impatient: None) -> Iterator[tuple[Engine, EngineRun, Held]]:
    """A row whose first mask is late, beside another one."""
    rules = Held(grammars.mask(JSON, ()))
    engine, ran = make_engine(MODEL, max_concurrent_sequences=2), EngineRun()
    engine.add(following(rules))
    engine.add(ask("plain", max_tokens=60))
    for _ in range(5):
        ran.take(engine)
    assert [one.request for one in engine.planner.sequences.late] == ["a"]
    yield engine, ran, rules
    rules.go.set()


@pytest.mark.parametrize(
    ("early", "method"),
    [
        (True, ParkMethod.SWAP),
        (False, ParkMethod.RECOMPUTE),
        pytest.param(True, ParkMethod.RECOMPUTE, marks=pytest.mark.soak),
        pytest.param(False, ParkMethod.SWAP, marks=pytest.mark.soak),
    ],
)
def test_a_row_is_parked_while_its_mask_is_late(held, grammars: Grammars, method: ParkMethod, early: bool) -> None:
    engine, ran, rules = held
    engine.set_supervised(True)
    assert engine.park(RequestId("a"), 1, 12, 12, method)
    ran.take(engine)
    if early:
        rules.go.set()
    assert engine.resume(RequestId("a"), 1, 12)
    for _ in range(5):
        ran.take(engine)
        engine.check()
    rules.go.set()
    while engine.has_work():
        ran.take(engine)
        engine.check()
    assert ran.tokens["a"] == run(make_engine(MODEL), masked(grammars, JSON, slow=False)).tokens["a"]


def test_a_row_is_cancelled_while_its_mask_is_late(held) -> None:
    engine, ran, _rules = held
    assert engine.cancel(RequestId("a"), 1)
    engine.check()
    while engine.has_work():
        ran.take(engine)
    assert len(ran.tokens["plain"]) == 60
    assert engine.report().pages_free == engine.report().pages


def test_a_late_row_keeps_its_place(held) -> None:
    engine, ran, _rules = held
    engine.add(ask("third", max_tokens=2))
    for _ in range(10):
        ran.take(engine)
    assert "third" not in ran.tokens


@pytest.mark.usefixtures("impatient")
def test_with_iterations_ahead_a_mask_sees_each_token_before_the_next(grammars: Grammars) -> None:
    expected = run(make_engine(MODEL, kernels="exact"), masked(grammars, JSON, slow=False)).tokens["a"]
    engine = make_engine(MODEL, plan_ahead=1, kernels="exact")
    found, _late = runs(engine, masked(grammars, JSON), ask("plain", max_tokens=60))
    assert found["a"] == expected
    assert len(found["plain"]) == 60


@pytest.mark.usefixtures("patient")
def test_rules_that_fail_end_their_own_request(grammars: Grammars) -> None:
    class Broken(Slow):
        def allowed(self) -> bytes:
            raise BaseException("a panic")  # noqa: TRY002 - as the bindings of Rust raise it

    ran = run(make_engine(MODEL), following(Broken(grammars.mask(WORD, ()), 0)), ask("plain"))
    assert isinstance(ran.last["a"].error, InvalidRequest)
    assert "panic" not in ran.last["a"].error.message
    assert len(ran.tokens["plain"]) == 40


def test_slow_masks_do_not_delay_other_masks(grammars: Grammars) -> None:
    threads = MaskThreads()
    slow = [Held(grammars.mask(WORD, ())) for _ in range(MAX_THREADS - 1)]
    for one in slow[1:]:
        threads.make([RowMask(one)], spent=0.0)
    quick = RowMask(grammars.mask(WORD, ()))
    threads.make([RowMask(slow[0]), quick], spent=4.0)  # a twentieth of it is waited for the slow one
    while quick.late and threads.wait(5):
        pass
    assert quick.allowed is not None
    for one in slow:
        one.go.set()


def test_slow_masks_of_one_iteration_do_not_delay_its_other_masks(grammars: Grammars) -> None:
    """Mutation: `MaskThreads.make` begins one more thread after its wait, not one for each mask."""
    threads = MaskThreads()
    slow = [Held(grammars.mask(WORD, ())) for _ in range(MAX_THREADS - 1)]
    quick = RowMask(grammars.mask(WORD, ()))
    threads.make([*map(RowMask, slow), quick], spent=0.0)
    while quick.late and threads.wait(5):
        pass
    assert quick.allowed is not None
    for one in slow:
        one.go.set()


class Watched:
    """Notes which threads make its masks. One that is slow takes CPU time."""

    failure = None

    def __init__(self) -> None:
        self.by_own: list[bool] = []
        self.slow = False
        self._own = threading.current_thread()

    def take(self, token: int, place: int) -> bool:
        return True

    def back_to(self, place: int) -> None: ...

    def allowed(self) -> bytes:
        self.by_own.append(threading.current_thread() is self._own)
        began = time.thread_time()
        while self.slow and time.thread_time() - began < 0.005:
            pass
        return b""

    def make(self, threads: MaskThreads, mask: RowMask) -> bool:
        """Whether this thread has made it"""
        mask.allowed = None
        threads.make([mask], spent=0.0)
        while mask.late:
            threads.wait(5)
        return self.by_own[-1]


def test_the_engines_thread_makes_masks_that_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutations: it makes the first one; one slow mask is forgotten after the next one."""
    monkeypatch.setattr(mask_threads, "MAX_WAIT_SECONDS", 0.002)
    rules, threads = Watched(), MaskThreads()
    mask = RowMask(rules)
    assert [rules.make(threads, mask) for _ in range(3)] == [False, True, True]
    rules.slow = True
    assert rules.make(threads, mask)  # nobody knew
    assert mask.slow
    assert not rules.make(threads, mask)
    rules.slow = False
    assert not any(rules.make(threads, mask) for _ in range(MASKS_OF_MISTRUST))
    assert not mask.slow
    assert rules.make(threads, mask)


def test_the_engines_thread_makes_quick_masks_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_threads, "MAX_WAIT_SECONDS", 0.002)
    rules, threads = Watched(), MaskThreads()
    mask = RowMask(rules)
    rules.make(threads, mask)
    monkeypatch.setattr(mask_threads, "MAX_WAITS_SECONDS", 0.0)
    assert not rules.make(threads, mask)


@pytest.mark.usefixtures("patient")
def test_nobody_waits_for_a_mask_whose_last_one_was_slow(grammars: Grammars) -> None:
    """Mutation: the engine's thread waits for all that it has begun."""
    threads, held = MaskThreads(), Held(grammars.mask(WORD, ()))
    slow, quick = RowMask(held), RowMask(grammars.mask(WORD, ()))
    slow.slow = True
    threads.make([slow, quick], spent=0.0)
    assert slow.late
    assert quick.allowed is not None
    held.go.set()


@pytest.mark.usefixtures("impatient")
def test_a_lone_row_waits_for_its_mask_and_not_for_commands(grammars: Grammars) -> None:
    """Mutation: the loop takes an iteration whose only row was late as one that computed nothing."""
    engine = make_engine(MODEL)
    loop = EngineLoop(engine, clock=monotonic)
    engine.add(masked(grammars, JSON))
    waits, late = list[float | None](), 0
    while engine.has_work():
        waits.append(loop.command_wait_seconds())
        loop.turn()
        late += bool(engine.planner.sequences.late)
    assert late > 2
    assert set(waits) == {0.0}


@pytest.mark.usefixtures("patient")
def test_masks_leave_the_cores_to_the_engine() -> None:
    """Mutation: the threads have no initializer."""

    class Rules:
        failure = None
        priority: int | None = None

        def take(self, token: int, place: int) -> bool:
            return True

        def allowed(self) -> bytes:
            self.priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            return b""

    rules = Rules()
    MaskThreads().make([RowMask(rules)], spent=0.0)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    lower = NICENESS if sys.platform == "linux" else 0  # elsewhere threads have no priority of their own
    assert rules.priority == min(19, own + lower)
