"""One /metrics for all processes of this machine: their metrics, joined, each sample with the label `service`."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from motet.metrics_socket import read_metrics

log = structlog.get_logger(__name__)

SUFFIX = ".metrics.sock"
OWN_SERVICE = "gateway"
CREATED = "_created"
"""Creation times of counters. The text format has them only as separate gauges, so they are left out."""


async def scrape_all(folder: Path, *, but: Path | None = None) -> dict[str, str]:
    """The metrics of every process with a socket in `folder`, by service. Processes that do not answer are left out."""
    sockets = [path for path in sorted(folder.glob(f"*{SUFFIX}")) if path != but]
    texts = await asyncio.gather(*(read_metrics(path) for path in sockets))
    return {path.name.removesuffix(SUFFIX): text for path, text in zip(sockets, texts, strict=True) if text is not None}


class _Joined(Collector):
    """Metric families of several processes, with one HELP and TYPE each."""

    def __init__(self, services: Mapping[str, Iterable[Metric]]) -> None:
        self._services = services

    def collect(self) -> Iterator[Metric]:
        joined: dict[str, Metric] = {}
        for service, families in self._services.items():
            for family in families:
                if family.name.endswith(CREATED):
                    continue
                whole = joined.get(family.name)
                if whole is None:
                    whole = Metric(family.name, family.documentation, family.type, family.unit)
                    joined[family.name] = whole
                elif whole.type != family.type:
                    log.warning("metrics_type_conflict", family=family.name, service=service)
                    continue
                for sample in family.samples:
                    if sample.name.endswith(CREATED):
                        continue
                    labels = {"service": service} | sample.labels
                    whole.samples.append(sample._replace(labels=labels))
        return iter(joined.values())


def exposition(own: CollectorRegistry, others: Mapping[str, str]) -> bytes:
    """Valid text in Prometheus' format."""
    services: dict[str, Iterable[Metric]] = {OWN_SERVICE: own.collect()}
    for service, text in others.items():
        try:
            services[service] = list(text_string_to_metric_families(text))
        except ValueError as error:
            log.warning("metrics_parse_failed", service=service, reason=str(error))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Joined(services))
    return generate_latest(registry)
