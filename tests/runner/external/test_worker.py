"""What vLLM is asked for each plan. `tests/contract/test_engines.py` says what an engine must do as a whole."""

import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from safetensors import SafetensorError

from motet.domain import BASE, Digest, ParkMethod, RequestId
from motet.errors import AdapterError, AdapterIncompatible, InvalidRequest, MotetError, Overloaded
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.external.vllm.adapter_loads import AdapterLoads
from motet_runner.external.vllm.driven import Ask
from motet_runner.external.vllm.engine import Engine
from motet_runner.external.vllm.worker import LostStep, Worker
from motet_runner.interface import (
    AdapterFailed,
    AdapterLoaded,
    EngineConfig,
    Logprobs,
    NewSequence,
    Sampling,
    StateChanged,
)
from motet_runner.plan import AdapterLoad, RowJoin, RowStep, StepPlan
from motet_runner.plan.step_plan import DecodeRows
from motet_runner.row_mask import RowMask
from tests.runner.engines import ask, run
from tests.runner.external.fake_driven import EOS, VOCABULARY, FakeDriven, facts

A, B = Digest("A"), Digest("B")


def engine_with(driven: FakeDriven, **config) -> Engine:
    modules = {"model.layers.0.mlp.up_proj": (16, 32)}
    usual = {"model": Path(), "max_concurrent_sequences": 8, "max_resident_adapters": 2}
    return Engine(
        EngineConfig(**(usual | config)), driven, target_modules=modules, eos_token_ids=(EOS,), clock=time.perf_counter
    )


def whole(name: str, **kw) -> list[int]:
    return run(engine_with(FakeDriven()), ask(name, **kw)).tokens[name]


def test_a_usual_iteration_asks_vllm_for_nothing_new() -> None:
    driven = FakeDriven()
    ran = run(engine_with(driven), *(ask(name, max_tokens=30) for name in "abc"))
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == dict.fromkeys("abc", 30)
    assert (len(driven.asked), driven.steps, driven.aborted) == (3, 30, [])


@pytest.mark.parametrize("block_tokens", [16, 32, 128])
@pytest.mark.parametrize("preset", ["paged-chunk", "punica", "s3"])
def test_vllm_never_lacks_a_block(block_tokens: int, preset: str) -> None:
    """The double fails where vLLM would preempt a request."""
    driven = FakeDriven(facts(blocks=96, block_tokens=block_tokens))
    engine = engine_with(driven, max_concurrent_sequences=4, preset=preset)
    engine.set_overcommit(1.5)
    sizes = {f"r{n}": 5 + 29 * n % 83 for n in range(12)}
    parts = [ask(name, prompt=prompt, max_tokens=60, promise=max(1, prompt // 32)) for name, prompt in sizes.items()]
    ran = run(engine, *parts)
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == dict.fromkeys(sizes, 60)
    assert driven.most_blocks > 0
    assert not driven.running


def test_each_block_is_a_page() -> None:
    engine = engine_with(FakeDriven(facts(blocks=10, block_tokens=128)))
    info = engine.info
    assert (info.pages, info.page_tokens, info.page_bytes) == (10, 128, 128 * 256)
    assert (engine.report().pages, engine.planner.memory.page_tokens) == (10, 128)


def test_a_report_says_what_vllm_has_stopped_by_itself() -> None:
    assert engine_with(FakeDriven()).report().stopped_by_itself == 0
    assert engine_with(FakeDriven(stopped=3)).report().stopped_by_itself == 3


def test_the_engine_has_a_name_and_a_version() -> None:
    info = engine_with(FakeDriven(facts(version="0.32.7"))).info
    assert (info.backend, info.version) == ("vllm", "0.32.7")


def test_an_iteration_that_gives_nothing_yet_is_called_again() -> None:
    """With several stages iterations overlap: tokens come with a later call."""
    driven = FakeDriven(late=2)
    ran = run(engine_with(driven), *(ask(name, prompt=40, max_tokens=9) for name in "ab"))
    assert ran.tokens == {name: whole(name, prompt=40, max_tokens=9) for name in "ab"}
    assert (len(driven.asked), driven.aborted) == (2, [])


def test_a_prompt_comes_in_pieces_and_the_others_go_on_beside_them() -> None:
    driven = FakeDriven()
    engine = engine_with(driven, prefill_chunk_tokens=32)
    ran = run(engine, ask("a"), steps=2)
    run(engine, ask("long", prompt=100), ran=ran, steps=3)
    assert len(ran.tokens["a"]) == 5
    pieces = [one for one in driven.asked if one.options["max_tokens"] == 1]
    assert [len(one.tokens) for one in pieces] == [32, 64, 96]
    assert len({one.salt for one in pieces}) == 1, "each finds what the earlier ones have computed"
    run(engine, ran=ran)
    assert ran.tokens["long"] == whole("long", prompt=100)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_long_prompt_stops_no_other_row(*, prefix_cache: bool) -> None:
    """Its pieces fit beside the others, as each finds what the earlier ones have computed."""
    driven = FakeDriven(budget=48)
    engine = engine_with(driven, prefill_chunk_tokens=32, prefix_cache=prefix_cache)
    ran = run(engine, ask("a", tenant="x"), ask("b"), steps=2)
    run(engine, ask("long", prompt=200, tenant="x"), ran=ran)
    assert driven.aborted == []
    assert driven.steps < 60
    assert ran.tokens == {name: whole(name, prompt=prompt) for name, prompt in (("a", 20), ("b", 20), ("long", 200))}


def test_a_prompt_that_vllm_cuts_gives_no_other_row_a_second_token() -> None:
    driven = FakeDriven(budget=40)
    engine = engine_with(driven)
    ran = run(engine, ask("a"), steps=3)
    run(engine, ask("long", prompt=100), ran=ran)
    assert ran.tokens == {name: whole(name, prompt=prompt) for name, prompt in (("a", 20), ("long", 100))}


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_parked_row_comes_again_with_all_its_tokens(*, prefix_cache: bool) -> None:
    driven = FakeDriven()
    engine = engine_with(driven, prefix_cache=prefix_cache)
    engine.set_supervised(True)
    ran = run(engine, ask("a", min_tokens=20, temperature=1.0, tenant="x"), steps=10)
    promise = engine.report().sequences[0].promise
    assert engine.park(RequestId("a"), 1, promise, promise, ParkMethod.SWAP)
    run(engine, ran=ran)
    assert engine.resume(RequestId("a"), 1, promise)
    run(engine, ran=ran)
    first, second = driven.asked
    assert second.salt == first.salt, "it finds its own KV"
    assert list(second.tokens) == [*first.tokens, *ran.tokens["a"][:10]]
    assert (second.options["max_tokens"], second.options["min_tokens"]) == (30, 10)
    assert first.options["seed"] != second.options["seed"]


def test_a_suspect_is_alone_in_vllm() -> None:
    driven = FakeDriven()
    engine = engine_with(driven)
    ran = run(engine, ask("plain"), steps=1)
    engine.add(replace(ask("suspect"), engines_lost=1))
    alone = False
    while engine.has_work():
        output = engine.step()
        if alone:
            assert {one.request for one in output.sequences} == {"suspect"}
        alone = any(isinstance(event, StateChanged) and event.alone for event in output.events)
        for one in output.sequences:
            ran.tokens[one.request] = ran.tokens.get(one.request, []) + one.tokens
    assert ran.tokens == {name: whole(name) for name in ("plain", "suspect")}
    assert driven.aborted, "the others are not in its iteration"


@pytest.mark.parametrize(("prefix_cache", "alike"), [(True, [1, 1, 1, 2]), (False, [1] * 5)])
def test_tenants_share_no_kv(*, prefix_cache: bool, alike: list[int]) -> None:
    driven = FakeDriven()
    prompt = tuple(range(2, 40))
    requests = [ask(f"r{n}", prompt=prompt, tenant=tenant) for n, tenant in enumerate(["x", "x", "y", None, None])]
    run(engine_with(driven, prefix_cache=prefix_cache), *requests)
    salts = Counter(one.salt for one in driven.asked)
    assert sorted(salts.values()) == alike, "one of each tenant, and one of each request without"
    assert all(salts)


def test_an_adapter_gets_a_new_number_each_time_it_is_loaded(layout: AdapterLayout) -> None:
    folders: list[Path] = []
    driven = FakeDriven(
        takes=lambda folder: folders.append(folder.joinpath("adapter_config.json").resolve(strict=True))
    )
    engine = engine_with(driven, max_resident_adapters=1)
    for _ in range(2):
        for digest in (A, B):
            engine.load_adapter(digest, layout)
            ran = run(engine, ask("a", adapter=digest))
            assert [event.digest for event in ran.of(AdapterLoaded)] == [digest]
            assert len(driven.adapters) == 1
    assert [one.adapter for one in driven.asked] == [1, 2, 3, 4]
    assert not [folder for folder in folders if folder.exists()], "vLLM has read them"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("rank 9\nis wrong"),
        AdapterIncompatible("wrong"),
        AssertionError(),
        KeyError("lora_A"),
        Exception("an error of vLLM's own kind"),
    ],
)
def test_an_adapter_that_vllm_does_not_take_fails_alone(layout: AdapterLayout, error: Exception) -> None:
    def takes(_: Path) -> None:
        raise error

    engine = engine_with(FakeDriven(takes=takes))
    engine.load_adapter(A, layout)
    ran = run(engine, ask("a", adapter=A), ask("base"))
    (failed,) = ran.of(AdapterFailed)
    assert isinstance(failed.error, AdapterError)
    assert "\n" not in failed.error.message
    assert ran.last["a"].error is not None
    assert len(ran.tokens["base"]) == 40


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "folder for temporary files (TMPDIR)"),
        (SafetensorError("I/O error"), "folder for temporary files (TMPDIR)"),
        (MemoryError(), "lacks memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), "lacks memory"),
    ],
)
def test_an_adapter_whose_files_or_memory_fail_may_come_again(
    layout: AdapterLayout, error: Exception, said: str
) -> None:
    def takes(_: Path) -> None:
        raise error

    engine = engine_with(FakeDriven(takes=takes))
    engine.load_adapter(A, layout)
    ran = run(engine, ask("a", adapter=A), ask("base"))
    (failed,) = ran.of(AdapterFailed)
    assert isinstance(failed.error, Overloaded)
    assert said in failed.error.message
    assert len(ran.tokens["base"]) == 40


def test_each_linear_that_is_read_is_progress(layout: AdapterLayout) -> None:
    engine = engine_with(FakeDriven())
    engine.load_adapter(A, layout)
    before = engine.report().progress
    engine.add(ask("a", adapter=A))
    deadline = time.monotonic() + 20
    while not engine.report().adapters[0].on_device and time.monotonic() < deadline:
        engine.step()
    assert engine.report().progress > before
    assert engine.report().steps == 0


def test_a_folder_that_was_not_written_is_not_read(layout: AdapterLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("motet_runner.external.vllm.adapter_loads.write_adapter", fails)
    driven = FakeDriven()
    engine = engine_with(driven)
    engine.load_adapter(A, layout)
    ran = run(engine, ask("a", adapter=A))
    assert isinstance(ran.last["a"].error, Overloaded)
    assert not driven.adapters


def test_a_load_that_is_given_up_does_not_arrive_and_leaves_nothing(
    layout: AdapterLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for given_up_first in (True, False):
        may_end = threading.Event()
        monkeypatch.setattr(
            "motet_runner.external.vllm.adapter_loads.write_adapter", lambda *_, end=may_end: end.wait(30)
        )
        driven = FakeDriven()
        loads = AdapterLoads(driven, time.perf_counter)
        of_others = set(threading.enumerate())
        assert loads.advance([AdapterLoad(1, A, layout)], {1: 0}, hurry=False) == ([], [])
        (writer,) = [one for one in threading.enumerate() if one.name == "adapter-load" and one not in of_others]
        if given_up_first:
            assert loads.advance([], {}, hurry=False) == ([], [])
        may_end.set()
        writer.join(30)
        assert loads.advance([], {}, hurry=True) == ([], [])
        assert not driven.adapters
        assert not list(tmp_path.iterdir())


def test_logprobs_are_the_rows_own() -> None:
    class Drawn(FakeDriven):
        def logprobs_of(self, ask: Ask) -> Logprobs:
            return Logprobs(-float(len(ask.tokens)))

    asked = [ask("plain"), ask("short", prompt=5, logprobs=True), ask("long", prompt=9, logprobs=True)]
    ran = run(engine_with(Drawn()), *asked)
    found = {
        name: {one.logprob for out in ran.outputs if out.request == name for one in out.logprobs} for name in ran.last
    }
    assert found == {"plain": set(), "short": {-5.0}, "long": {-9.0}}


def test_without_room_for_a_folder_an_adapter_fails_alone(
    layout: AdapterLayout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    engine = engine_with(FakeDriven())
    engine.load_adapter(A, layout)
    ran = run(engine, ask("a", adapter=A), ask("base"))
    (failed,) = ran.of(AdapterFailed)
    assert isinstance(failed.error, Overloaded)
    assert len(ran.tokens["base"]) == 40


def test_without_room_for_a_thread_an_adapter_fails_alone(
    layout: AdapterLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def starts(thread: threading.Thread) -> None:
        if thread.name == "adapter-load":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    engine = engine_with(FakeDriven())
    engine.load_adapter(A, layout)
    ran = run(engine, ask("a", adapter=A), ask("base"))
    (failed,) = ran.of(AdapterFailed)
    assert isinstance(failed.error, Overloaded)
    assert "can't start new thread" in failed.error.message
    assert len(ran.tokens["base"]) == 40


def test_a_row_that_no_plan_has_ends_the_engine() -> None:
    """Its tokens would be lost, and whose they are is not known."""
    driven = FakeDriven()
    engine = engine_with(driven)
    run(engine, ask("a"), steps=2)
    (one,) = driven.asked
    driven.add(one._replace(name="of nobody"))
    with pytest.raises(LostStep):
        engine.step()


# ------------------------------------------------------------------------------------------------ masks and penalties


class Rules:
    """A row may have a token that is followed by itself, or the next one. Some masks come late."""

    def __init__(self, late: frozenset[int] = frozenset(), dead_at: int = -1) -> None:
        self.taken: list[int] = []
        self.failure: MotetError | None = None
        self.late, self.dead_at = late, dead_at
        self.may_end = threading.Event()

    def take(self, token: int, place: int) -> bool:
        del self.taken[place:]
        self.taken.append(token)
        return True

    def back_to(self, place: int) -> None:
        del self.taken[place:]

    def allowed(self) -> bytes:
        place = len(self.taken)
        if place in self.late:
            assert self.may_end.wait(10)
        if place == self.dead_at:
            self.failure = InvalidRequest("nothing may come")
            return b""
        return (3 << self._first(place)).to_bytes(VOCABULARY // 8, "little")

    def _first(self, place: int) -> int:
        return 10 + 2 * place

    def follows(self, tokens: list[int]) -> bool:
        return all(token - self._first(place) in (0, 1) for place, token in enumerate(tokens))


def masked(name: str, rules: Rules, **more) -> NewSequence:
    return replace(ask(name, **more), mask=RowMask(rules))


def test_a_masked_row_gets_only_what_its_mask_allows_and_its_neighbours_what_they_would_get() -> None:
    rules = Rules()
    driven = FakeDriven()
    ran = run(engine_with(driven), masked("a", rules), ask("b"))
    assert rules.follows(ran.tokens["a"])
    assert rules.taken == ran.tokens["a"]
    assert len(ran.tokens["a"]) == 40
    assert ran.tokens["b"] == whole("b")
    assert (driven.steps, driven.aborted) == (40, [])


def test_a_row_whose_mask_is_late_is_left_out_and_nobody_waits() -> None:
    rules = Rules(late=frozenset({0, 5}))
    driven = FakeDriven()
    engine = engine_with(driven)
    ran = run(engine, masked("a", rules), ask("b", max_tokens=60), steps=20)
    assert not ran.tokens.get("a")
    assert len(ran.tokens["b"]) == 20
    rules.may_end.set()
    run(engine, ran=ran)
    assert rules.follows(ran.tokens["a"])
    assert len(ran.tokens["a"]) == 40
    assert ran.tokens["b"] == whole("b", max_tokens=60)


def test_an_engine_whose_only_row_is_late_waits_without_an_iteration_of_vllm() -> None:
    rules = Rules(late=frozenset({0}))
    driven = FakeDriven()
    engine = engine_with(driven)
    ran = run(engine, masked("a", rules), steps=1)
    before = driven.steps
    for _ in range(5):
        output = engine.step()
        assert output.late
        assert not output.sequences
    assert driven.steps == before
    rules.may_end.set()
    run(engine, ran=ran)
    assert len(ran.tokens["a"]) == 40


def test_a_row_whose_mask_leaves_no_token_ends_with_its_reason() -> None:
    driven = FakeDriven()
    ran = run(engine_with(driven), masked("a", Rules(dead_at=4)), ask("b"))
    assert str(ran.last["a"].error) == "nothing may come"
    assert len(ran.tokens["a"]) == 4
    assert ran.tokens["b"] == whole("b")
    assert not driven.running


def test_an_end_that_comes_too_early_for_a_masked_row_is_no_token() -> None:
    """vLLM forbids it, too: then nothing is left, and vLLM would draw something all the same."""
    only_ends = ask("a", allowed_token_ids=frozenset({EOS}), min_tokens=3, ignore_eos=False)
    ran = run(engine_with(FakeDriven()), only_ends)
    assert isinstance(ran.last["a"].error, InvalidRequest)
    assert ran.tokens.get("a", []) == []
    with_another = ask("a", allowed_token_ids=frozenset({EOS, 7}), min_tokens=3, ignore_eos=False, max_tokens=3)
    assert run(engine_with(FakeDriven()), with_another).tokens["a"] == [7, 7, 7]


def test_a_masked_row_that_was_parked_goes_on_behind_its_tokens() -> None:
    rules = Rules()
    engine = engine_with(FakeDriven())
    engine.set_supervised(True)
    ran = run(engine, masked("a", rules), steps=10)
    promise = engine.report().sequences[0].promise
    assert engine.park(RequestId("a"), 1, promise, promise, ParkMethod.RECOMPUTE)
    run(engine, ran=ran)
    assert engine.resume(RequestId("a"), 1, promise)
    run(engine, ran=ran)
    assert rules.follows(ran.tokens["a"])
    assert len(ran.tokens["a"]) == 40


def test_the_words_that_an_answer_may_not_have_count_from_what_was_delivered() -> None:
    first = whole("a")
    ran = run(engine_with(FakeDriven()), ask("a", bad_words=((first[9], first[10]),), delivered=tuple(first[:10])))
    assert ran.tokens["a"][0] != first[10]


@pytest.mark.parametrize("delivered", [0, 7])
def test_penalties_count_the_answer_and_not_the_prompt(delivered: int) -> None:
    """The double never takes a token that loses more than 1."""
    prompt = tuple(whole("a", max_tokens=30))
    answer = run(engine_with(FakeDriven()), ask("a", prompt=prompt, presence_penalty=2.0)).tokens["a"]
    assert len(set(answer)) == len(answer)
    driven = FakeDriven()
    moved = ask("a", prompt=prompt, presence_penalty=2.0, delivered=tuple(answer[:delivered]))
    assert run(engine_with(driven), moved).tokens["a"] == answer[delivered:]
    assert [(one.penalties, one.output_tokens) for one in driven.asked] == [((2.0, 0.0), delivered)]


def test_a_seed_that_nobody_has_set_does_not_go_to_vllm() -> None:
    driven = FakeDriven()
    drawn = replace(ask("drawn", temperature=1.0), seed=5, seed_is_drawn=True)
    run(engine_with(driven), drawn, replace(ask("set", temperature=1.0), seed=5))
    assert [one.options["seed"] is None for one in driven.asked] == [True, False]


@pytest.mark.parametrize("by_position", [False, True])
def test_noise_that_depends_on_the_position_goes_on_with_the_same_seed(*, by_position: bool) -> None:
    driven = FakeDriven(facts(noise_by_position=by_position))
    engine = engine_with(driven)
    engine.set_supervised(True)
    ran = run(engine, ask("a", temperature=1.0), steps=10)
    promise = engine.report().sequences[0].promise
    assert engine.park(RequestId("a"), 1, promise, promise, ParkMethod.RECOMPUTE)
    run(engine, ran=ran)
    assert engine.resume(RequestId("a"), 1, promise)
    run(engine, ran=ran)
    first, second = (one.options["seed"] for one in driven.asked)
    assert (first == second) is by_position


# ---------------------------------------------------------------------------- plans whose decodes have the same rows


def joined(row: int) -> RowJoin:
    return RowJoin(
        row=row,
        request=RequestId(str(row)),
        tokens=tuple(range(2 + row, 20 + row)),
        prompt_tokens=18,
        adapter=BASE,
        sampling=Sampling(max_tokens=40, ignore_eos=True),
        seed=0,
        choice=0,
    )


def worker_with(driven: FakeDriven) -> Worker:
    return Worker(driven, time.perf_counter, frozenset({EOS}), share_prefixes=True)


def test_rows_that_vllm_has_cut_come_again_with_the_next_plan() -> None:
    worker = worker_with(FakeDriven(budget=20))
    both = DecodeRows((0, 1), (17, 17))
    plans = [
        StepPlan(number=1, joins=(joined(0), joined(1)), decodes=both),
        StepPlan(number=2, decodes=replace(both, iterations=1)),
    ]
    assert [len(worker.compute(plan).sampled) for plan in plans] == [2, 2]


def test_a_row_that_a_plan_leaves_out_after_its_prompt_gets_no_token() -> None:
    driven = FakeDriven()
    worker = worker_with(driven)
    one = DecodeRows((0,), (17,))
    prompt = RowStep(1, 0, 18, samples=True)
    plans = [
        StepPlan(number=1, joins=(joined(0), joined(1)), decodes=one, prefills=(prompt,)),
        StepPlan(number=2, decodes=replace(one, iterations=1)),
    ]
    assert [len(worker.compute(plan).sampled) for plan in plans] == [2, 1]
    assert len(driven.running) == 1


def test_a_mask_may_take_a_share_of_a_long_iteration() -> None:
    class Slow(Rules):
        def allowed(self) -> bytes:
            time.sleep(0.05)
            return super().allowed()

    seconds = count(step=1000.0)  # pass between two looks at the clock
    worker = Worker(FakeDriven(), lambda: next(seconds), frozenset({EOS}), share_prefixes=True)
    worker.compute(StepPlan(number=1, joins=(joined(0),), decodes=DecodeRows((0,), (17,))))
    masked_row = replace(joined(1), mask=RowMask(Slow()))
    result = worker.compute(StepPlan(number=2, joins=(masked_row,), decodes=DecodeRows((0, 1), (18, 17))))
    assert result.late == ()
