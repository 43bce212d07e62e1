"""`python -m motet_operator.cluster`: the operator on a cluster, as the chart starts it."""

import asyncio

from motet.imports import without_collections

with without_collections():
    from prometheus_client import CollectorRegistry

    from motet.health import Health
    from motet.read_settings import read
    from motet.service_main import run
    from motet.settings import LeaseSettings, ProcessSettings
    from motet.surroundings import real_surroundings
    from motet_operator.cluster.cluster_operator import ClusterOperator
    from motet_operator.settings import ClusterSettings


def main() -> None:
    process, settings, lease = read(ProcessSettings), read(ClusterSettings), read(LeaseSettings)

    async def operate(stop: asyncio.Event, registry: CollectorRegistry, health: Health) -> None:
        await ClusterOperator(process, settings, lease, real_surroundings()).run(stop, registry, health)

    run("operator", process, operate)


if __name__ == "__main__":
    main()
