"""metrics.md: every metric of every `metrics` module, with its labels and its explanation."""

import importlib
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from motet.surroundings import real_surroundings
from tools.reference.markdown import code, flat, note, table
from tools.reference.packages import PACKAGES


def metrics_classes(package: str) -> Iterator[type]:
    """The metrics classes of every module `metrics` in the package and its subpackages."""
    (folder,) = importlib.import_module(package).__path__
    for path in sorted(Path(folder).rglob("metrics.py")):
        name = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and value.__module__ == name and value.__name__.endswith("Metrics"):
                yield value


def metrics_of(package: str) -> list[list[str]]:
    rows: dict[str, list[str]] = {}
    for kind in metrics_classes(package):
        # Each class has its own registry: two classes of one package may have metrics in common.
        registry = CollectorRegistry(auto_describe=True)
        kind(registry, **_parts_of_surroundings(kind))
        for collector in list(registry._collector_to_names):  # noqa: SLF001 - there is no public list
            own = getattr(collector, "_labelnames", ()) if isinstance(collector, MetricWrapperBase) else ()
            for metric in collector.describe() if hasattr(collector, "describe") else collector.collect():
                if not metric.documentation:
                    sys.exit(f"{kind.__module__}: the metric {metric.name} has no explanation")
                name = metric.name + ("_total" if metric.type == "counter" else "")
                labels = own or getattr(metric, "_labelnames", ())  # of a collector that we wrote
                rows[name] = [code(name), metric.type, ", ".join(map(code, labels)), flat(metric.documentation)]
    return [rows[name] for name in sorted(rows)]


def _parts_of_surroundings(kind: type) -> dict[str, object]:
    """What the class asks for besides its registry."""
    wanted, around = signature(kind).parameters, real_surroundings()
    return {name: getattr(around, name) for name in ("clock", "wall") if name in wanted}


def metrics_page() -> str:
    parts = [
        note("each package's metrics.py"),
        "# Metrics\n",
        flat("""In the Prometheus text format. Locally each process serves its own on a Unix socket, and the gateway's
        `/metrics` appends all of them with a label `service`. Every process also has the usual metrics
        `process_`, `python_info` and `python_gc_`. Histograms appear as `_bucket`, `_sum` and `_count`. Counters begin
        at 0 when a process starts; look at their rate. The labels `tenant`, `adapter` and those that list adapters are
        empty unless MOTET_METRICS_NAMES says how many may be named.""")
        + "\n",
    ]
    for package, title in PACKAGES.items():
        if rows := metrics_of(package):
            parts += [f"## {title}\n", table(["metric", "type", "labels", "meaning"], rows)]
    return "\n".join(parts)
