"""Scaling over real gRPC: the operator is told how many runners a pool needs, from zero and back to zero."""

import pytest

from motet.api.v1 import scheduler_pb2
from motet_scheduler.settings import Settings
from motet_simulator.fake_engine import SlowEngines
from tests.support.in_process_services import until
from tests.support.in_process_system import in_process_system

BUILTIN = {
    "scaling": scheduler_pb2.SCALING_MODE_BUILTIN,
    "max_replicas": 3,
    "scale_down_stabilization_seconds": 0.3,
}


@pytest.fixture
async def system(folder):
    async with in_process_system(folder, scheduler=Settings(growth_seconds=1.0)) as one:
        yield one


async def test_a_held_request_brings_the_first_runner_and_runs_on_it(system):
    system.operator.state(replicas=0, **BUILTIN)
    await until(lambda: system.operator.desired and system.operator.desired.reason_code == "Idle")
    assert (system.operator.desired.replicas, system.operator.desired.stale) == (0, False)
    held = scheduler_pb2.Held(groups=[scheduler_pb2.HeldGroup(group="default/demo", requests=1)])
    system.gateway.link.send(scheduler_pb2.ServeUp(held=held))
    await until(lambda: system.operator.desired.replicas == 1)
    assert system.operator.desired.reason_code == "HeldRequests"
    system.operator.state(replicas=1, **BUILTIN)
    await system.runner("r0")
    system.gateway.link.send(scheduler_pb2.ServeUp(held=scheduler_pb2.Held()))
    assert len(await system.gateway.ask("a", max_tokens=4)) == 4
    await until(lambda: system.operator.desired.replicas == 0)
    assert not system.operator.desired.stale


async def test_a_queue_at_a_pool_scaled_to_zero_brings_a_runner_back(system):
    system.operator.state(replicas=0, **BUILTIN)
    answer = system.gateway.start("a", max_tokens=4)
    await until(lambda: system.operator.desired and system.operator.desired.reason_code == "Requests")
    assert system.operator.desired.replicas == 1
    assert system.gateway.asked["a"].positions[0] == (1, "no runner of this model is up")
    system.operator.state(replicas=1, **BUILTIN)
    await system.runner("r0")
    assert len(await answer) == 4


async def test_load_brings_more_runners_and_its_end_takes_them_away(system):
    system.operator.state(replicas=1, **BUILTIN)
    engines = SlowEngines(pages=16)
    await system.runner("r0", engines)
    answers = [system.gateway.start(f"a{n}", max_tokens=60, prompt=(n, 1)) for n in range(12)]
    await until(lambda: system.operator.desired and system.operator.desired.replicas == 3)
    assert system.operator.desired.reason_code == "AtMaximum"
    system.operator.state(replicas=3, **BUILTIN)
    await system.runner("r1", engines)
    await system.runner("r2", engines)
    engines.hurry()
    for answer in answers:
        assert len(await answer) == 60
    await until(lambda: system.operator.desired.replicas == 0)


async def test_a_restarted_scheduler_does_not_scale_down_before_its_runners_report(system):
    system.operator.state(replicas=2, **BUILTIN)
    await system.runner("r0")
    await system.runner("r1")
    await until(lambda: system.control.scheduler_service.file_stale is False)
    system.operator.received.clear()
    await system.control.restart_scheduler()
    first = await until(lambda: system.operator.desired)
    assert first.replicas == 2, first
    await until(lambda: system.operator.desired.replicas == 0)


def figure(system, name: str) -> float:
    return system.control.scheduler_metrics.get_sample_value(name, {"pool_namespace": "default", "pool": "demo"}) or 0.0


async def test_the_figures_that_an_autoscaler_reads_are_served(system):
    system.operator.state(replicas=1, scaling=scheduler_pb2.SCALING_MODE_EXTERNAL, max_replicas=5)
    await system.runner("r0", engines := SlowEngines(pages=8))
    answers = [system.gateway.start(f"a{n}", max_tokens=60, prompt=(n, 1)) for n in range(3)]
    await until(lambda: figure(system, "motet_pool_desired_replicas") > 1)
    await until(lambda: figure(system, "motet_pool_waiting_requests") == 1)
    assert figure(system, "motet_pool_running_requests") == 2
    assert 0 < figure(system, "motet_pool_kv_promised_ratio") <= 1
    assert figure(system, "motet_pool_serving_runners") == 1
    assert figure(system, "motet_pool_held_requests") == 0
    engines.hurry()
    for answer in answers:
        await answer
