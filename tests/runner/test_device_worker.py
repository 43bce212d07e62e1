"""The worker of a device that computes by itself: the same answers, and no decode step waits for the device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
import torch

from motet.domain import BASE, Digest
from motet_runner.engine import Engine
from motet_runner.execute.batch.row_table import TableRow
from motet_runner.execute.sample.device_sampler import NOT_FINITE, DeviceSampler
from motet_runner.execute.sample.host_sampler import Sampler
from motet_runner.execute.worker.device_worker import DeviceWorker
from motet_runner.interface import NewSequence
from motet_runner.memory.link import link_to
from motet_runner.memory.parcel import Parcel
from motet_runner.plan import StepPlan
from tests.runner.engines import EngineRun, ask, load, make_device_engine, make_local_engine, run
from tests.support.little_memory import memory_that_ends
from tests.support.no_waiting import Waited, no_waiting

TUNED = [Digest(f"sha256:{number}") for number in range(3)]
KERNELS = ["torch", "cpp"]


def every_option() -> list[NewSequence]:
    """Beside each other: what a sampler can be asked for, prompts in chunks, adapters and the base."""
    return [
        ask("greedy", prompt=70),
        ask("tuned", prompt=30, adapter=TUNED[0]),
        ask("drawn", prompt=5, temperature=1.0, seed=3),
        ask("cold", prompt=5, temperature=0.2, seed=3, adapter=TUNED[1]),
        ask("cut", prompt=9, temperature=1.3, top_k=20, seed=7),
        ask("cuts", prompt=9, temperature=1.1, top_p=0.9, min_p=0.02, seed=8),
        ask("one", prompt=8, temperature=2.0, top_k=1, seed=8),
        ask("present", prompt=33, presence_penalty=0.7, frequency_penalty=0.3),
        ask("repeats", prompt=17, repetition_penalty=1.3, temperature=0.7, seed=1),
        ask("biased", prompt=6, logit_bias={5: 40.0, 6: 39.9, 499: -100.0}, frequency_penalty=1.7),
        ask("awake", prompt=6, min_tokens=11, stop_token_ids=frozenset({5, 6, 7}), logit_bias={5: 30.0, 6: 29.0}),
        ask("moved", prompt=9, delivered=(3, 4, 5), min_tokens=10, presence_penalty=1.1),
        ask("told", prompt=12, logprobs=True, top_logprobs=3),
        ask("told less", prompt=12, logprobs=True, temperature=0.5),
        ask("scored", prompt=50, prompt_logprobs=2, max_tokens=5),
        ask("scored and tuned", prompt=40, prompt_logprobs=0, adapter=TUNED[2], max_tokens=5),
    ]


def answers(engine: Engine, adapters: list[Path]) -> EngineRun:
    for digest, folder in zip(TUNED, adapters, strict=False):
        load(engine, digest, folder)
    asked = every_option()
    ran = run(engine, *asked[:9], steps=4)
    run(engine, *asked[9:], ran=ran, steps=6)
    return run(engine, ask("late", prompt=40, temperature=1.0, top_p=0.8), ran=ran)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("ahead", [0, 1])
def test_it_says_what_the_worker_of_a_cpu_says(llama: Path, adapters: list[Path], kernels: str, ahead: int) -> None:
    settings = {"kernels": kernels, "prefill_chunk_tokens": 24}
    local, device = make_local_engine(llama, **settings), make_device_engine(llama, **settings, plan_ahead=ahead)
    assert isinstance(device.diagnostics.worker, DeviceWorker)
    expected, ours = answers(local, adapters), answers(device, adapters)
    assert ours.tokens == expected.tokens
    assert len(ours.tokens) == len(every_option()) + 1
    assert told(ours) == told(expected)
    assert len(told(ours)) == 80 + 49 + 39


CUT_CPP = {"kernels": "cpp", "prefill_chunk_tokens": 24}


@pytest.fixture(scope="module")
def undisturbed(llama: Path, adapters: list[Path]) -> dict[str, list[int]]:
    return answers(make_local_engine(llama, **CUT_CPP), adapters).tokens


@pytest.mark.parametrize(
    ("seed", "near_the_end"),
    [
        (0, False),
        (1, True),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in [(0, True), (1, False), (2, False), (2, True)]),
    ],
)
@pytest.mark.parametrize("make", [make_device_engine, make_local_engine])
def test_memory_that_ends_in_any_operation_costs_no_token(  # noqa: PLR0917
    llama: Path,
    adapters: list[Path],
    undisturbed: dict[str, list[int]],
    seed: int,
    near_the_end: bool,
    make: Callable[..., Engine],
) -> None:
    """What an iteration has begun to change is not changed a second time when its rows are computed again, and no
    buffer is larger in the books than in memory."""
    engine = make(llama, **CUT_CPP, plan_ahead=1)
    with memory_that_ends(seed, near_the_end=near_the_end) as failures:
        ours = answers(engine, adapters)
    assert failures.count > 10
    assert failures.first > 3
    assert ours.tokens == undisturbed


@pytest.mark.parametrize("make", [make_device_engine, pytest.param(make_local_engine, marks=pytest.mark.soak)])
def test_memory_that_ends_while_buffers_grow_costs_no_token(llama: Path, make: Callable[..., Engine]) -> None:
    """Iterations of more rows than there have been before, also when the kernels were judged, until the buffers have
    grown"""
    asked = [ask(f"{number}", prompt=90 + number, max_tokens=3) for number in range(8)]
    settings = {"kernels": "cpp", "prefill_chunk_tokens": 1024}
    expected = run(make_local_engine(llama, **settings), *asked).tokens
    first, grown = 0, 0
    for seed in range(10):
        engine = make(llama, **settings)
        program = engine.diagnostics.loaded.fused.program
        before = program._room  # noqa: SLF001
        with memory_that_ends(seed, near_the_end=False) as failures:
            ours = run(engine, *asked)
        assert ours.tokens == expected
        row_bytes = program._row_bytes[program._given :]  # noqa: SLF001
        assert [len(buffer) for buffer in program._memory] == [program._room * count for count in row_bytes]  # noqa: SLF001
        first += failures.first
        grown += program._room > before  # noqa: SLF001
    assert first > 10
    assert grown > 0


def test_what_is_compiled_first_does_not_count_as_time_of_a_prefill(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, seconds = make_device_engine(llama).diagnostics.worker, iter([60.0, 0.5])
    collect = worker.collect
    monkeypatch.setattr(worker, "collect", lambda: replace(collect(), seconds=next(seconds)))
    assert worker.measure(100)[0] == 0.5 / 100


def told(ran: EngineRun) -> dict[tuple[str, int], object]:
    """The log probabilities of each token. Who computes beside a row changes their last digits."""
    found = [((one.request, one.index), one.logprobs[0]) for one in ran.outputs if one.logprobs]
    found += [((name, -1 - at), one) for name, scores in ran.scores.items() for at, one in enumerate(scores)]
    return {
        key: [(token, pytest.approx(logprob, abs=1e-5)) for token, logprob in ((None, one.logprob), *one.top)]
        for key, one in found
    }


def watch_decodes(engine: Engine) -> list[int]:
    """From now on, what waits for the device in a step that only decodes is an error. → rows of each such step"""
    launch, watched = engine.diagnostics.worker.launch, []

    def launched(plan: StepPlan) -> None:
        if plan.prefills or plan.joins:
            launch(plan)
            return
        watched.append(plan.count)
        with no_waiting():
            launch(plan)

    engine.diagnostics.worker.launch = launched  # type: ignore[method-assign]
    return watched


@pytest.mark.parametrize("ahead", [0, 1])
def test_no_decode_step_waits_for_the_device(llama: Path, adapters: list[Path], ahead: int) -> None:
    """[syncs = 0]"""
    engine = make_device_engine(llama, kernels="cpp", plan_ahead=ahead)
    watched = watch_decodes(engine)
    ours = answers(engine, adapters)
    assert len(watched) > 30
    assert max(watched) >= 14, "all options beside each other"
    assert ours.tokens == answers(make_local_engine(llama, kernels="cpp"), adapters).tokens


@pytest.mark.parametrize("vocabulary", [600, 40_000])
def test_its_sampler_takes_the_same_tokens_from_the_same_logits(vocabulary: int) -> None:
    """Bit for bit, with rows that come and go, logits that are not finite, and many that are equal"""
    generator = torch.Generator().manual_seed(5)
    link = link_to(torch.device("cpu"), perf_counter)
    ours, theirs = DeviceSampler(link, frozenset({1}), vocabulary), Sampler(frozenset({1}))
    tables = [
        [
            TableRow(number, one.request, list(one.prompt), len(one.prompt), BASE, one.sampling, one.seed, one.choice)
            for number, one in enumerate(every_option())
        ]
        for _ in range(2)
    ]
    for step in range(20):
        logits = torch.randn(len(tables[0]), vocabulary, generator=generator, dtype=torch.float32).mul_(3)
        logits[:, -12:] += 12  # so that tokens repeat
        if step % 3 == 0:
            logits = logits.round()
        if step == 10:
            logits[3, 5], logits[4, 7], logits[0, 2] = float("nan"), float("inf"), float("nan")
        if step == 15:  # a row leaves, and another one takes its place
            place = 8
            ours.leave(place)
            for table in tables:
                row = table[place]
                table[place] = replace(row, tokens=row.tokens[:20], adjustment=None, seed=9)
        expected = theirs.sample(logits, tables[1])
        parcel = Parcel()
        sampling = ours.prepare(tables[0], parcel)
        sent = parcel.send(link)
        with no_waiting():
            samples = sampling.sample(logits, sent)
            sampling.count(sampling.counted(samples))
        tokens = samples.tokens.tolist()
        assert [None if token == NOT_FINITE else token for token in tokens] == expected.tokens
        assert sampling.logprobs(samples.logprobs[0]) == expected.logprobs
        for rows in tables:
            for row, token in zip(rows, tokens, strict=True):
                row.tokens.append(max(token, 0))


@pytest.mark.parametrize(
    "ask_for_a_value",
    [
        lambda x: bool(x.any()),
        lambda x: x[x > 0],
        torch.Tensor.nonzero,
        lambda x: x.max().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, x),
        lambda x: x.masked_select(x > 0),
        lambda x: range(x[0]),
    ],
)
def test_a_way_to_a_value_is_seen(ask_for_a_value: Callable[[torch.Tensor], object]) -> None:
    numbers = torch.arange(3)
    with pytest.raises(Waited), no_waiting():
        ask_for_a_value(numbers)
