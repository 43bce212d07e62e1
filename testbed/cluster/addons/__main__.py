"""`python -m testbed.cluster.addons`: cluster DNS and a pod scheduler. On a real cluster both run as pods."""

import argparse
import asyncio
from pathlib import Path

from testbed.cluster.addons.dns import Resolver, ServiceNames
from testbed.cluster.addons.pod_scheduler import PodScheduler
from testbed.cluster.api import Api, Mirror
from testbed.cluster.network import DNS


async def run(scheduler: Path, dns: Path, ready: Path) -> None:
    async with Api(scheduler) as places, Api(dns) as reads, asyncio.TaskGroup() as tasks:
        services = Mirror(reads, "/api/v1/services")
        slices = Mirror(reads, "/apis/discovery.k8s.io/v1/endpointslices")
        names = ServiceNames(services, slices)
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: Resolver(names.addresses), local_addr=(DNS, 53))
        tasks.create_task(services.run())
        tasks.create_task(slices.run())
        tasks.create_task(PodScheduler(places).run())
        await services.synced.wait()
        await slices.synced.wait()
        ready.touch()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m testbed.cluster.addons", description=__doc__)
    parser.add_argument("--scheduler-kubeconfig", type=Path, required=True)
    parser.add_argument("--dns-kubeconfig", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path, required=True, help="appears when both know the cluster")
    given = parser.parse_args()
    asyncio.run(run(given.scheduler_kubeconfig, given.dns_kubeconfig, given.ready_file))


if __name__ == "__main__":
    main()
