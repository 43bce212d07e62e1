"""The labels of a runner's metrics."""

import time

from prometheus_client import CollectorRegistry, generate_latest

from motet_runner.metrics import Metrics


def shown(*, names: int) -> str:
    registry = CollectorRegistry()
    Metrics(registry, wall=time.time, names=names).on_adapters(
        max_lora=8, waiting={f"acme/w{number}" for number in range(3)}, running={"acme/pirate"}
    )
    (line,) = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("vllm:lora_req")]
    return line.rpartition(" ")[0]


def test_adapters_are_not_named_unless_the_platform_wants_it() -> None:
    name = "vllm:lora_requests_info"
    assert shown(names=0) == name + '{max_lora="8",running_lora_adapters="",waiting_lora_adapters=""}'


def test_adapters_are_named_for_routers_as_vllm_does_and_not_without_end() -> None:
    assert 'running_lora_adapters="acme/pirate",waiting_lora_adapters="acme/w0,acme/w1"' in shown(names=2)
