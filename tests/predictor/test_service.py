"""The predictor over real gRPC, with a real database, as an object and as a process."""

import asyncio
import itertools
import os
import signal
import sqlite3
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc.aio import AioRpcError
from prometheus_client import CollectorRegistry

from motet.api.v1 import common_pb2, predictor_pb2, predictor_pb2_grpc
from motet.clock import monotonic
from motet.length_statistics import LengthStatistics
from motet.store import length_samples, migrate, open_store
from motet.transport.methods import OBSERVE, PREDICT
from motet.transport.over_grpc import GrpcNetwork, is_healthy, open_channel
from motet_gateway.estimator import OUTCOMES_AT_ONCE, PROBE_TIMEOUT_SECONDS
from motet_predictor import sample_features
from motet_predictor import service as service_module
from motet_predictor.learned_requests import MAX_LEARNED, LearnedRequests
from motet_predictor.length_model import VERSION, LengthModel
from motet_predictor.metrics import Metrics
from motet_predictor.persistence import ROWS_PER_WRITE, Persistence
from motet_predictor.prompt_model import PromptModel
from motet_predictor.prompt_weights import PromptWeights
from motet_predictor.sample_features import MAX_SAMPLE_BYTES
from motet_predictor.service import MAX_REST_SECONDS, MIN_REST_SECONDS, PROMPTS_TOGETHER, PredictorService, rest_between
from tests.common.waiting import PATIENCE_S
from tests.support.hostile_messages import hostile

NUMBERS = itertools.count()
"""Of requests"""


class Predictor:
    """A predictor's parts, and a client's view of it."""

    def __init__(self, address: str, persistence: Persistence, model: PromptModel, registry: CollectorRegistry) -> None:
        self.address = address
        self.persistence = persistence
        self.model = model
        self.registry = registry

    async def estimate(self, adapter: str = "acme/pirate", max_tokens: int = 1000) -> common_pb2.Estimate:
        return (await predict(self.address, adapter, max_tokens=max_tokens)).estimates[0]

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"motet_predictor_{name}", labels) or 0.0


async def predict(address: str, *adapters: str, max_tokens: int = 1000) -> predictor_pb2.PredictResponse:
    prompts = [predictor_pb2.Prompt(tenant="acme", adapter=one, max_tokens=max_tokens) for one in adapters]
    async with open_channel(address) as channel:
        stub: predictor_pb2_grpc.PredictorAsyncStub = predictor_pb2_grpc.PredictorStub(channel)
        return await stub.Predict(predictor_pb2.PredictRequest(prompts=prompts), timeout=PATIENCE_S)


async def observe(address: str, *tokens: int, adapter: str = "acme/pirate", **more: object) -> int:
    outcomes = [
        predictor_pb2.Outcome(
            **({"request": f"r{next(NUMBERS)}", "tenant": "acme", "adapter": adapter, "output_tokens": one} | more)  # type: ignore[arg-type]
        )
        for one in tokens
    ]
    async with open_channel(address) as channel:
        stub: predictor_pb2_grpc.PredictorAsyncStub = predictor_pb2_grpc.PredictorStub(channel)
        accepted = 0
        while accepted < len(outcomes):
            request = predictor_pb2.ObserveRequest(outcomes=outcomes[accepted:])
            accepted += (await stub.Observe(request, timeout=PATIENCE_S)).accepted
        return accepted


@asynccontextmanager
async def running(
    folder: Path, *, queued_samples: int = 1000, load_scopes: int = 1000, url: str = "", begins: bool = True
) -> AsyncIterator[Predictor]:
    """A predictor in this process, writing only when told to: `persistence.flush()`. The first one loads, too."""
    registry = CollectorRegistry()
    metrics, model, learned = Metrics(registry), PromptModel(LengthModel()), LearnedRequests()
    address = f"unix:{folder}/p.sock"
    async with open_store(url or database(folder), busy_seconds=0.05) as store:
        persistence = Persistence(
            store,
            model.lengths,
            metrics,
            learned,
            load_scopes=load_scopes,
            queued_samples=queued_samples,
            keep_samples=1000,
        )
        service = PredictorService(model, persistence, metrics, monotonic, learned)
        async with GrpcNetwork().serving(address, service.handlers):
            if begins:
                await persistence.flush()
            yield Predictor(address, persistence, model, registry)


def database(folder: Path) -> str:
    return f"sqlite+aiosqlite:///{folder}/motet.db"


def assert_alike(one: common_pb2.Estimate, other: common_pb2.Estimate) -> None:
    """Equal quantiles. What a tenant's adapters start from is computed again only at times, so ranks may differ."""
    assert [one.q50, one.q80, one.q90, one.q95] == [other.q50, other.q80, other.q90, other.q95]
    assert one.rank == pytest.approx(other.rank, rel=0.02)


async def test_every_answer_names_its_model(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        response = await predict(predictor.address, "acme/pirate", "acme/json", "")
        assert [estimate.source for estimate in response.estimates] == [f"model:{VERSION}"] * 3
        assert response.model_version == VERSION
        assert (await predict(predictor.address)).estimates == []


async def test_an_outcome_is_learned_at_once(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        before = await predictor.estimate()
        assert await observe(predictor.address, *[25] * 20) == 20
        after = await predictor.estimate()
        assert after.q95 <= 26 < before.q95
        assert after.rank < before.rank


async def test_a_call_with_more_prompts_than_are_estimated_together_has_an_answer_to_each(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        await observe(predictor.address, *[25] * 20, adapter="short")
        await observe(predictor.address, *[700] * 20, adapter="long")
        asked = ["long" if number % 3 else "short" for number in range(2 * PROMPTS_TOGETHER + 1)]
        answered = (await predict(predictor.address, *asked)).estimates
        assert [one.q50 > 100 for one in answered] == [adapter == "long" for adapter in asked]


async def test_many_outcomes_at_once_delay_no_estimate(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        service = PredictorService(
            predictor.model, predictor.persistence, Metrics(CollectorRegistry()), monotonic, LearnedRequests()
        )
        outcomes = [predictor_pb2.Outcome(tenant="acme", adapter="acme/pirate", output_tokens=25)] * 512
        observed = service.handlers[OBSERVE](predictor_pb2.ObserveRequest(outcomes=outcomes))
        observing = asyncio.create_task(observed)
        await asyncio.sleep(0)
        request = predictor_pb2.PredictRequest(prompts=[predictor_pb2.Prompt(tenant="acme", max_tokens=100)])
        assert len((await service.handlers[PREDICT](request)).estimates) == 1
        assert not observing.done()
        assert (await observing).accepted == predictor.model.answers > 1


async def test_a_call_ends_before_its_gateway_gives_up_and_says_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when many gateways send at the same time what they have kept."""
    monkeypatch.setattr(service_module, "rest_between", lambda _: 0.02)
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        service = PredictorService(
            predictor.model, predictor.persistence, Metrics(CollectorRegistry()), monotonic, LearnedRequests()
        )
        outcomes = [predictor_pb2.Outcome(tenant="acme", output_tokens=25)] * OUTCOMES_AT_ONCE
        calls = [service.handlers[OBSERVE](predictor_pb2.ObserveRequest(outcomes=outcomes)) for _ in range(8)]
        started = monotonic()
        answers = await asyncio.gather(*calls)
        assert monotonic() - started < PROBE_TIMEOUT_SECONDS + 0.25
        assert all(0 < answer.accepted < OUTCOMES_AT_ONCE for answer in answers)
        assert sum(answer.accepted for answer in answers) == predictor.model.answers


async def test_an_estimate_waits_for_one_outcome_and_not_for_one_in_each_turn_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC takes a Predict through several turns."""
    monkeypatch.setattr(service_module, "rest_between", lambda outcomes: 10 * rest_between(outcomes))
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        service = PredictorService(
            predictor.model, predictor.persistence, Metrics(CollectorRegistry()), monotonic, LearnedRequests()
        )
        outcomes = [predictor_pb2.Outcome(tenant="acme", adapter="acme/pirate", output_tokens=25)] * 20
        observing = asyncio.create_task(service.handlers[OBSERVE](predictor_pb2.ObserveRequest(outcomes=outcomes)))
        await asyncio.sleep(0)
        before = predictor.model.answers
        for _ in range(10):
            await asyncio.sleep(0)
        assert before == 1
        assert predictor.model.answers <= 2
        await observing


def test_few_outcomes_leave_time_for_an_estimate_and_many_do_not_let_their_gateway_wait() -> None:
    assert rest_between(1) == rest_between(16) == MAX_REST_SECONDS
    assert OUTCOMES_AT_ONCE * rest_between(OUTCOMES_AT_ONCE) < PROBE_TIMEOUT_SECONDS / 4
    assert rest_between(100_000) == MIN_REST_SECONDS


async def test_no_call_of_a_hostile_peer_fails_or_keeps_others_from_being_stored(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor, open_channel(predictor.address) as channel:
        stub: predictor_pb2_grpc.PredictorAsyncStub = predictor_pb2_grpc.PredictorStub(channel)
        for request in hostile(predictor_pb2.PredictRequest):
            await stub.Predict(request, timeout=PATIENCE_S)
        for outcomes in hostile(predictor_pb2.ObserveRequest):
            await stub.Observe(outcomes, timeout=PATIENCE_S)
        assert await predictor.persistence.flush()
        assert 1 <= (await predictor.estimate()).q50 <= (await predictor.estimate()).q95 <= 1000


async def test_estimates_keep_to_the_clients_bound(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        await observe(predictor.address, *[700] * 20)
        estimate = await predictor.estimate(max_tokens=64)
        assert [estimate.q50, estimate.q80, estimate.q90, estimate.q95] == [64] * 4


async def test_a_restart_keeps_what_was_learned(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        await observe(predictor.address, *[25] * 20)
        await predictor.persistence.flush()
        learned = await predictor.estimate()
    async with running(tmp_path) as predictor:
        assert_alike(await predictor.estimate(), learned)


async def test_an_outcome_that_is_sent_again_is_learned_once(tmp_path: Path) -> None:
    """As after a call that broke, also if the predictor has died meanwhile."""
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor, open_store(database(tmp_path)) as store:
        for _ in range(2):
            assert await observe(predictor.address, 25, request="sent twice") == 1
        assert predictor.metric("outcomes_total", censored="false") == predictor.model.answers == 1
        await observe(predictor.address, 25, request="")
        await observe(predictor.address, 25, request="")
        assert predictor.model.answers == 3, "without a name nobody knows"
        await predictor.persistence.flush()
        assert await length_samples.count_samples(store) == 3
    async with running(tmp_path) as predictor:
        assert await observe(predictor.address, 25, request="sent twice") == 1
        assert await observe(predictor.address, 25, request="another") == 1
        assert predictor.metric("outcomes_total", censored="false") == 1


async def test_no_outcome_is_learned_before_it_is_known_which_were(tmp_path: Path) -> None:
    """A predictor learns one, writes it and dies before it answers: it comes to the next one while that loads."""
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        await observe(predictor.address, 25, request="sent twice")
        await predictor.persistence.flush()
    async with running(tmp_path, begins=False) as predictor, open_store(database(tmp_path)) as store:
        outcomes = [predictor_pb2.Outcome(request="sent twice", tenant="acme", output_tokens=25)]
        async with open_channel(predictor.address) as channel:
            stub: predictor_pb2_grpc.PredictorAsyncStub = predictor_pb2_grpc.PredictorStub(channel)
            sent = predictor_pb2.ObserveRequest(outcomes=outcomes)
            assert (await stub.Observe(sent, timeout=PATIENCE_S)).accepted == 0
            again = asyncio.ensure_future(stub.Observe(sent, timeout=PATIENCE_S))
            await predictor.persistence.flush()
            assert (await again).accepted == 1
        await predictor.persistence.flush()
        assert await length_samples.count_samples(store) == 1
        assert predictor.model.answers == 0


async def test_an_outcome_that_could_not_be_learned_is_not_among_those_that_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        with monkeypatch.context() as fails, pytest.raises(AioRpcError):
            fails.setattr(service_module, "features_of", lambda _: 1 / 0)
            await observe(predictor.address, 25, request="sent twice")
        assert await observe(predictor.address, 25, request="sent twice") == 1
        assert predictor.model.answers == 1


def test_so_many_requests_are_remembered_and_no_more() -> None:
    learned = LearnedRequests()
    for number in range(MAX_LEARNED + 1):
        assert f"r{number}" not in learned
        learned.add(f"r{number}")
    assert f"r{MAX_LEARNED}" in learned
    assert "r1" in learned
    assert "r0" not in learned
    learned.recall(["before"])
    assert "before" not in learned, "the newest are remembered"
    learned.add("")
    assert "" not in learned


async def test_samples_hold_counts_and_hashes(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor, open_store(database(tmp_path)) as store:
        believed = common_pb2.Estimate(q50=10, q80=20, q90=30, q95=40, source=f"model:{VERSION}")
        how = {"promised_tokens": 48, "parks": 2, "finish": common_pb2.FINISH_REASON_LENGTH}
        prompt = {"features": [2**32 - 1, 1], "feature_space": 7, "prompt_tokens": 9}
        await observe(predictor.address, 25, request="r", estimate=believed, **how, **prompt)
        await predictor.persistence.flush()
        (sample,) = await length_samples.newest_samples(store, 10)
        assert sample == length_samples.LengthSample(
            request="r",
            tenant="acme",
            adapter="acme/pirate",
            prompt_tokens=9,
            output_tokens=25,
            censored=False,
            estimated_q50=10,
            estimated_q95=40,
            estimate_source=f"model:{VERSION}",
            features=struct.pack("<I", 7) + b"\x01\0\0" + b"\xff" * 3,
            estimated_q80=20,
            estimated_q90=30,
            promised_tokens=48,
            parks=2,
            finish="length",
        )


async def test_a_sample_has_at_most_a_kibibyte_however_long_its_names_are(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor, open_store(database(tmp_path)) as store:
        for request, name in (("r1", "acme/pirate"), ("r2", "a" * 2000)):
            believed = common_pb2.Estimate(source=f"model:{name}")
            known = {"request": request, "features": range(500), "feature_space": 7, "estimate": believed}
            await observe(predictor.address, 25, adapter=name, **known)
        await predictor.persistence.flush()
        for sample in await length_samples.newest_samples(store, 10):
            names = sample.request, sample.tenant, sample.adapter, sample.estimate_source
            assert sum(len(name) for name in names) + len(sample.features) <= MAX_SAMPLE_BYTES
            space, features = sample_features.from_bytes(sample.features)
            assert space == 7
            assert len(features) >= 100


async def test_answers_to_one_prompt_keep_the_same_features(tmp_path: Path) -> None:
    """By them a refit knows that it is one prompt."""
    await migrate(database(tmp_path))
    tenant, adapter = "customer-support-prod", "customer-support-prod/ticket-summaries-german-v2"
    async with running(tmp_path) as predictor, open_store(database(tmp_path)) as store:
        for choice in ("", ".1", "-2.11"):
            for letter, source in (("a", "tenant"), ("b", "model:quantiles-2"), ("c", "model:prompts-3.123")):
                outcome = predictor_pb2.Outcome(
                    request=letter * 24 + choice,
                    tenant=tenant,
                    adapter=adapter,
                    features=range(280),
                    feature_space=7,
                    estimate=common_pb2.Estimate(source=source),
                )
                async with open_channel(predictor.address) as channel:
                    stub: predictor_pb2_grpc.PredictorAsyncStub = predictor_pb2_grpc.PredictorStub(channel)
                    await stub.Observe(predictor_pb2.ObserveRequest(outcomes=[outcome]), timeout=PATIENCE_S)
        await predictor.persistence.flush()
        samples = await length_samples.newest_samples(store, 100)
    assert len(samples) == 9
    assert len({one.features for one in samples}) == 1
    assert len(samples[0].features) > 3 * 250


async def test_many_outcomes_do_not_keep_an_estimate_waiting(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        await predictor.estimate()
        learning = asyncio.create_task(observe(predictor.address, *[25] * 3000))
        while not predictor.model.answers:
            await asyncio.sleep(0)
        await predictor.estimate()
        assert not learning.done()
        assert await learning == 3000


async def test_a_save_writes_no_more_than_it_may_and_the_rest_later(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor, open_store(database(tmp_path)) as store:
        for number in range(5 * ROWS_PER_WRITE):
            await observe(predictor.address, 25, adapter=f"acme/{number}")
        counts = []
        for _ in range(60):
            await predictor.persistence.flush(at_most=ROWS_PER_WRITE // 5 * MAX_SAMPLE_BYTES)
            counts.append(await length_samples.count_samples(store))
        assert counts[0] == ROWS_PER_WRITE, "one batch at least"
        assert max(counts[n + 10] - counts[n] for n in range(50)) <= 2 * ROWS_PER_WRITE
        assert counts[-1] == 5 * ROWS_PER_WRITE


async def test_rows_of_scopes_that_were_forgotten_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of adapters that are made for one run."""
    monkeypatch.setattr(length_samples, "DELETED_AT_ONCE", 7)
    await migrate(database(tmp_path))

    def kept() -> list[tuple[str, str]]:
        with sqlite3.connect(tmp_path / "motet.db") as connection:
            return connection.execute("SELECT level, adapter FROM predictor_state ORDER BY updated").fetchall()

    async with running(tmp_path, load_scopes=5) as predictor, open_store(database(tmp_path)) as store:
        correction = length_samples.PredictorState(length_samples.CORRECTION_LEVEL, "acme", "acme/0", b"kept")
        await length_samples.save(store, VERSION, [correction], [], keep_samples=1)
        for number in range(50):
            predictor.model.observe("acme", f"acme/{number}", 10)
            if number % 5 == 4:
                await predictor.persistence.flush()
        assert len(kept()) == 52
        await predictor.persistence.forget()
        assert len(kept()) == 11
        assert set(kept()) >= {("correction", "acme/0"), ("adapter", "acme/49"), ("tenant", "")}


async def test_metrics_show_the_calibration(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        ours = common_pb2.Estimate(q50=10, q80=20, q90=30, q95=40, source=f"model:{VERSION}")
        await observe(predictor.address, 15, 35, estimate=ours)
        await observe(predictor.address, 1, estimate=ours, censored=True)
        await observe(predictor.address, 1, estimate=common_pb2.Estimate(q50=10, source="max_tokens"))
        assert predictor.metric("judged_total") == 2
        covered = [predictor.metric("covered_total", quantile=q) for q in ("0.5", "0.8", "0.9", "0.95")]
        assert covered == [0, 1, 1, 2]
        assert predictor.metric("outcomes_total", censored="true") == 1


async def test_without_a_database_it_serves_and_learns_and_writes_later(tmp_path: Path) -> None:
    async with running(tmp_path, queued_samples=10) as predictor:  # nobody has migrated: no tables
        assert predictor.metric("store_up") == 0
        await observe(predictor.address, *[25] * 30)
        assert (await predictor.estimate()).q95 <= 26
        assert not await predictor.persistence.flush()
        assert predictor.metric("samples_dropped_total") == 20

        await migrate(database(tmp_path))
        assert await predictor.persistence.flush()
        assert predictor.metric("store_up") == 1
        async with open_store(database(tmp_path)) as store:
            assert await length_samples.count_samples(store) == 10
    async with running(tmp_path) as predictor:
        assert (await predictor.estimate()).q95 <= 26


async def test_a_locked_database_loses_nothing(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        holder = sqlite3.connect(tmp_path / "motet.db", isolation_level=None)
        try:
            holder.execute("BEGIN IMMEDIATE")
            await observe(predictor.address, *[25] * 20)
            assert not await predictor.persistence.flush()
            await observe(predictor.address, *[25] * 20)
            assert not await predictor.persistence.flush()
        finally:
            holder.close()
        assert await predictor.persistence.flush()
        async with open_store(database(tmp_path)) as store:
            assert await length_samples.count_samples(store) == 40
    async with running(tmp_path) as predictor:
        assert (await predictor.estimate()).q95 <= 26


async def test_a_database_that_comes_late_is_loaded_before_it_is_written(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        await observe(predictor.address, *[600] * 50)
        await predictor.persistence.flush()
    holder = sqlite3.connect(tmp_path / "motet.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    async with running(tmp_path) as predictor:
        await observe(predictor.address, 600, adapter="acme/json")
        holder.close()
        assert await predictor.persistence.flush()
        assert (await predictor.estimate(max_tokens=2000)).q50 >= 600
    async with running(tmp_path) as predictor:
        assert (await predictor.estimate(max_tokens=2000)).q50 >= 600


async def test_a_database_that_was_replaced_by_an_empty_one_is_written_again(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        await observe(predictor.address, 25)
        await predictor.persistence.flush()
        with sqlite3.connect(tmp_path / "motet.db") as other:
            other.execute("DELETE FROM predictor_state")
            other.execute("DELETE FROM predictor_versions")
        other.close()
        await observe(predictor.address, *[25] * 20)
        assert not await predictor.persistence.flush()
        assert await predictor.persistence.flush()
    async with running(tmp_path) as predictor:
        assert (await predictor.estimate()).q95 <= 26


async def test_writing_and_loading_many_scopes_do_not_block_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = 0

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            nonlocal handled
            handled += 1
            return plain(*arguments)

        return wrapped

    async def most_in_one_turn(work: Awaitable[Any]) -> int:
        doing, most = asyncio.ensure_future(work), 0
        while not doing.done():
            before = handled
            await asyncio.sleep(0)
            most = max(most, handled - before)
        await doing
        return most

    await migrate(database(tmp_path))
    monkeypatch.setattr(LengthStatistics, "to_bytes", counted(LengthStatistics.to_bytes))
    async with running(tmp_path) as predictor:
        for number in range(900):
            predictor.model.observe("acme", f"acme/{number}", 25)
        assert await most_in_one_turn(predictor.persistence.flush()) <= ROWS_PER_WRITE
        assert handled == 901
        async with open_store(database(tmp_path)) as store:
            assert len(await length_samples.load_states(store, VERSION, limit=2000)) == 901
    handled = 0
    monkeypatch.setattr(LengthStatistics, "from_bytes", counted(LengthStatistics.from_bytes))

    async def load() -> None:
        async with running(tmp_path):
            pass

    assert await most_in_one_turn(load()) <= ROWS_PER_WRITE
    assert handled == 901


@asynccontextmanager
async def process(folder: Path, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m motet_predictor`, as the operator starts it."""
    environment = os.environ | {
        "MOTET_DATA_DIR": str(folder),
        "MOTET_PREDICTOR_ADDRESS": f"unix:{folder}/p.sock",
        "MOTET_METRICS_ADDRESS": f"unix:{folder}/p.metrics.sock",
        "MOTET_TIME_SCALE": "0.05",
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "motet_predictor", env=environment | settings, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def until(true: Callable[[], Awaitable[bool]], seconds: float = PATIENCE_S) -> None:
    async with asyncio.timeout(seconds):
        while not await true():
            await asyncio.sleep(0.02)


async def test_a_killed_process_loses_at_most_its_last_batch(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    address = f"unix:{tmp_path}/p.sock"
    async with open_store(database(tmp_path)) as store, process(tmp_path) as child:
        await until(lambda: is_healthy(address))
        await observe(address, *[25] * 20)

        async def written() -> bool:
            return await length_samples.count_samples(store) == 20

        await until(written)  # within save_seconds × the time scale
        learned = (await predict(address, "acme/pirate")).estimates[0]
        await observe(address, 900, adapter="acme/json")
        child.kill()
        await child.wait()
    async with process(tmp_path) as child:
        await until(lambda: is_healthy(address))
        assert_alike((await predict(address, "acme/pirate")).estimates[0], learned)
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0


async def test_a_stopped_process_loses_nothing(tmp_path: Path) -> None:
    await migrate(database(tmp_path))
    address = f"unix:{tmp_path}/p.sock"
    async with process(tmp_path, MOTET_PREDICTOR_SAVE_SECONDS="3600", MOTET_TIME_SCALE="1") as child:
        await until(lambda: is_healthy(address))
        await observe(address, *[25] * 20)
        child.send_signal(signal.SIGTERM)
        assert await child.wait() == 0
    async with open_store(database(tmp_path)) as store:
        assert await length_samples.count_samples(store) == 20
        assert len(await length_samples.load_states(store, VERSION, limit=10)) == 2
    assert not (tmp_path / "p.sock").exists()


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("MOTET_DATABASE_URL", "mysql://somewhere", "are not supported"),
        ("MOTET_PREDICTOR_SAVE_SECONDS", "-1", "MOTET_PREDICTOR_SAVE_SECONDS is '-1': Input should be greater than 0"),
        ("MOTET_PREDICTOR_ADDRESS", "unix:/nowhere/p.sock", "cannot listen on unix:/nowhere/p.sock"),
    ],
)
async def test_a_wrong_setting_is_named_without_a_traceback(
    tmp_path: Path, setting: str, value: str, message: str
) -> None:
    async with process(tmp_path, **{setting: value}) as child:
        _, error = await child.communicate()
        assert child.returncode == 2
        assert message in error.decode()
        assert "Traceback" not in error.decode()


async def test_features_of_another_key_or_version_are_ignored_counted_and_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await migrate(database(tmp_path))
    async with running(tmp_path) as predictor:
        weights = predictor.model.serving.weights = PromptWeights.zero(7)
        weights.table[:, 6] = 9.0
        plain = await predictor.estimate()
        async with open_channel(predictor.address) as channel:
            stub: predictor_pb2_grpc.PredictorAsyncStub = predictor_pb2_grpc.PredictorStub(channel)

            async def estimate(space: int) -> common_pb2.Estimate:
                prompt = predictor_pb2.Prompt(
                    tenant="acme", adapter="acme/pirate", max_tokens=1000, features=[1, 2, 3], feature_space=space
                )
                answer = await stub.Predict(predictor_pb2.PredictRequest(prompts=[prompt]), timeout=PATIENCE_S)
                return answer.estimates[0]

            assert (await estimate(7)).q80 < plain.q80
            assert predictor.metric("features_ignored_total") == 0
            assert await estimate(8) == plain
            assert predictor.metric("features_ignored_total") == 1
            outcome = predictor_pb2.Outcome(tenant="acme", output_tokens=9, features=[1], feature_space=8)
            await stub.Observe(predictor_pb2.ObserveRequest(outcomes=[outcome]), timeout=PATIENCE_S)
            assert predictor.metric("features_ignored_total") == 1, "it counts prompts"
            await estimate(8)
            assert predictor.metric("features_ignored_total") == 2
    assert capsys.readouterr().out.count("features_ignored") == 1
