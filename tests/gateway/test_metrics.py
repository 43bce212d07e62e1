"""The metrics of all processes of a machine, in one text that every scraper can parse."""

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from motet.clock import FakeClock
from motet.errors import ModelNotFound
from motet.telemetry import KEEP_NAME_SECONDS, serving_metrics
from motet_gateway.exposition import exposition, scrape_all
from motet_gateway.metrics import Metrics
from testbed.fake_services import FakeServices
from tests.gateway.conftest import Served, eventually, serve


def families(text: str) -> dict[str, dict[tuple, float]]:
    parsed = list(text_string_to_metric_families(text))
    names = [family.name for family in parsed]
    assert len(names) == len(set(names)), "one HELP and TYPE for each family"
    return {family.name: {(s.name, *sorted(s.labels.items())): s.value for s in family.samples} for family in parsed}


def registry(steps: int) -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("motet_steps", "Engine steps.", registry=made).inc(steps)
    Gauge("motet_live", "Live.", ("kind",), registry=made).labels('odd "quoted"\nkind').set(steps)
    Histogram("motet_seconds", "Time.", buckets=(0.1, 1), registry=made).observe(0.5)
    return made


async def test_families_of_several_processes_are_joined(tmp_path: Path) -> None:
    async with (
        serving_metrics(f"unix:{tmp_path}/runner-0.metrics.sock", registry(3)),
        serving_metrics(f"unix:{tmp_path}/runner-1.metrics.sock", registry(5)),
    ):
        (tmp_path / "dead.metrics.sock").touch()
        others = await scrape_all(tmp_path)
    assert set(others) == {"runner-0", "runner-1"}
    joined = families(exposition(registry(7), others).decode())
    assert joined["motet_steps"][("motet_steps_total", ("service", "gateway"))] == 7
    assert joined["motet_steps"][("motet_steps_total", ("service", "runner-1"))] == 5
    assert joined["motet_live"][("motet_live", ("kind", 'odd "quoted"\nkind'), ("service", "runner-0"))] == 3
    assert joined["motet_seconds"][("motet_seconds_bucket", ("le", "1.0"), ("service", "runner-0"))] == 1


async def test_invalid_metrics_of_a_process_are_left_out(tmp_path: Path) -> None:
    text = exposition(registry(1), {"broken": "motet_steps{ 7 7 7"}).decode()
    assert all(("service", "gateway") in sample for samples in families(text).values() for sample in samples)


async def test_two_types_under_one_name_do_not_break_the_text() -> None:
    other = "# HELP motet_steps Steps.\n# TYPE motet_steps gauge\nmotet_steps 1\n"
    assert families(exposition(registry(1), {"odd": other}).decode())


async def test_the_gateway_shows_the_metrics_of_all_services(cluster: FakeServices) -> None:
    async with (
        serve(cluster, metrics_dir=cluster.folder, names=9) as served,
        serving_metrics(f"unix:{cluster.folder}/scheduler.metrics.sock", registry(2)),
    ):
        await served.http.post("/v1/completions", json={"model": "legal", "prompt": "Hi", "max_tokens": 3})
        answer = await served.http.get("/metrics")
        head = await served.http.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    joined = families(answer.text)
    who = (("adapter", "default/legal"), ("code", "200"), ("service", "gateway"), ("tenant", "default"))
    assert joined["motet_requests"][("motet_requests_total", *who)] == 1
    assert joined["motet_steps"][("motet_steps_total", ("service", "scheduler"))] == 2
    assert joined["motet_time_to_first_token_seconds"]


async def test_clients_see_no_metrics_except_on_a_local_stack(served: Served) -> None:
    assert served.gateway.settings.metrics_dir is None
    for ask in (served.http.get, served.http.head):
        assert (await ask("/metrics")).status_code == 404
    assert "/metrics" not in (await served.http.get("/openapi.json")).json()["paths"]


async def test_probes_answer_get_and_head(served: Served) -> None:
    for path in ("/health", "/ping", "/version"):
        assert (await served.http.get(path)).status_code == 200
        assert (await served.http.head(path)).status_code == 200
    assert (await served.http.get("/health")).content == b""


async def test_metrics_name_no_tenant_and_no_adapter_by_default(served: Served) -> None:
    await served.http.post("/v1/completions", json={"model": "legal", "prompt": "Hi", "max_tokens": 3})
    text = generate_latest(served.registry).decode()
    assert 'motet_requests_total{adapter="",code="200",tenant=""} 1.0' in text
    assert "legal" not in text


async def test_the_time_in_the_queue_is_measured_by_class(served: Served) -> None:
    for tier in ("priority", "flex", "flex", "auto"):
        body = {"model": "legal", "prompt": "Hi", "max_tokens": 3, "service_tier": tier}
        assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    assert queue_counts(served) == {"interactive": 1, "batch": 2, "standard": 1}


async def test_the_time_in_the_queue_has_its_class_also_when_the_revision_is_removed(served: Served) -> None:
    """If its revision is removed, a placed request starts again, and by then the adapter may be gone."""
    cluster = served.cluster
    gone = ModelNotFound("this revision of the adapter is no longer served").to_proto()
    for runner in cluster.runners:
        runner.declines = [gone, gone]
    body = {"model": "legal", "prompt": "Hi", "max_tokens": 3, "service_tier": "flex"}
    answer = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await eventually(lambda: cluster.scheduler.enqueued)
    del cluster.scheduler.adapters[0]
    cluster.scheduler.publish()
    assert (await answer).status_code == 404
    assert queue_counts(served) == {"batch": 1}


def queue_counts(served: Served) -> dict[str, float]:
    """How many requests left the queue, by class."""
    return {
        one.labels["class"]: one.value
        for family in served.registry.collect()
        for one in family.samples
        if one.name == "motet_request_queue_seconds_count"
    }


def test_all_metrics_of_a_removed_pair_of_names_are_removed() -> None:
    registry, clock = CollectorRegistry(), FakeClock()
    metrics = Metrics(registry, names=1, clock=clock)
    for adapter in ("acme/old", "acme/new"):
        who = metrics.who("acme", adapter)
        metrics.requests.labels(*who, "200").inc()
        metrics.tokens.labels(*who, "input").inc()
        for one in (metrics.time_to_first_token, metrics.time_per_output_token, metrics.request_duration):
            one.labels(*who).observe(1)
        clock.advance(2 * KEEP_NAME_SECONDS)
    text = generate_latest(registry).decode()
    assert "acme/new" in text
    assert "acme/old" not in text


async def test_a_scrape_that_hangs_does_not_hang_the_others(tmp_path: Path) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(hang, tmp_path / "hung.metrics.sock")
    async with server, serving_metrics(f"unix:{tmp_path}/fine.metrics.sock", registry(1)):
        assert set(await scrape_all(tmp_path)) == {"fine"}
