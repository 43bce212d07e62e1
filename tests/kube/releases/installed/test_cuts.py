"""Parts that cannot reach each other or the API server: clients see at most a pause."""

import asyncio
from dataclasses import dataclass

import pytest

from testbed.cluster.metrics import metric
from testbed.cluster.product import ADAPTERS, RELEASE, SYSTEM, ClientLoad, Product, stream
from tests.kube.releases.installed.steps import bring_storyteller, wait_for_runners, wait_for_silence, wait_for_streams

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

TOKENS = 1500
"""With these, streams still run when the test has found out where: iterations of the bundled model are short."""


@dataclass(frozen=True)
class ProductWithFixedGateway(Product):
    """Keeps using the gateway that it knows, like kube-proxy while the API server cannot be reached."""

    known: str = ""

    def gateway(self) -> str:
        return self.known


@pytest.mark.own_cluster
async def test_row_2_while_the_api_server_is_away_all_requests_are_served(product: Product) -> None:
    cluster, apiserver = product.cluster, product.cluster.apiserver
    assert apiserver is not None

    def leaders() -> list[str]:
        leases = cluster.items("leases", f"--namespace={SYSTEM}")
        return sorted(one["spec"]["holderIdentity"] for one in leases)

    def starts() -> dict[str, int]:
        """The restarts of each pod, without ending pods: the test before may have ended some."""
        pods = [*cluster.items("pods", f"--namespace={SYSTEM}"), *product.runners()]
        return {
            pod["metadata"]["name"]: pod["status"]["containerStatuses"][0]["restartCount"]
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
        }

    before = leaders(), starts()
    known = ProductWithFixedGateway(cluster, product.keys, product.gateway())
    cluster.let_namespaces_go()
    apiserver.kill()
    try:
        async with ClientLoad(known, 4, tokens=60) as load:
            await asyncio.sleep(13)  # a leader may act for ten seconds after its last renewal
    finally:
        apiserver.start()  # from this thread: the process ends with the thread that started it
    load.assert_nobody_noticed()
    print(f"{len(load.answers)} answers while the API server was away")
    bring_storyteller(product, "afterwards")
    cluster.kubectl("delete", "namespace", "afterwards", "--timeout=60s", timeout_s=70)
    assert (leaders(), starts()) == before, "no process ended because of it"


CUTS = [
    ("gateway", "runner", True),
    pytest.param("runner", "gateway", False, marks=pytest.mark.soak),
    pytest.param("scheduler", "runner", True, marks=pytest.mark.soak),
]
"""Which parts are cut off from each other, and whether in both directions. The runner is the one with more streams."""


@pytest.mark.own_cluster
@pytest.mark.parametrize(("one", "other", "both"), CUTS)
async def test_row_48_after_any_cut_a_client_sees_a_pause_and_no_token_twice(
    product: Product, two_runners: list[str], one: str, other: str, both: bool
) -> None:
    cluster = product.cluster
    assert cluster.network is not None
    undisturbed = await asyncio.gather(*(stream(product, model, tokens=TOKENS) for model in ADAPTERS))
    await asyncio.to_thread(wait_for_silence, product)
    running = [asyncio.create_task(stream(product, model, tokens=TOKENS)) for model in (*ADAPTERS, *ADAPTERS)]
    sequences = await asyncio.to_thread(wait_for_streams, product)
    addresses = _addresses(product, max(two_runners, key=lambda name: sequences[name]))
    with cluster.network.cut(addresses[one], addresses[other], both=both):
        running += [asyncio.create_task(stream(product, model, tokens=20)) for model in ADAPTERS]
        answers, _ = await asyncio.gather(
            asyncio.gather(*running), asyncio.to_thread(_wait_for_a_trace, product, addresses["scheduler"], one)
        )
    print(f"{one} and {other}: all {len(answers)} streams have ended while they were apart")
    assert [(one, other, answer.problem) for answer in answers if not answer.complete] == []
    assert [answer.tokens for answer in answers] == [TOKENS] * 2 * len(ADAPTERS) + [20] * len(ADAPTERS)
    for whole, answer in zip((*undisturbed, *undisturbed), answers, strict=False):
        assert answer.text == whole.text, f"{one} and {other}: after the pause it went on with something else"
    await asyncio.to_thread(wait_for_runners, product, 2)
    await asyncio.to_thread(cluster.wait_for, lambda: not any(product.sequences().values()), "the end of all sequences")


@pytest.mark.own_cluster
async def test_row_48_a_gateway_that_is_cut_off_from_the_scheduler_continues_its_streams(product: Product) -> None:
    cluster = product.cluster
    assert cluster.network is not None
    undisturbed = await asyncio.gather(*(stream(product, model, tokens=TOKENS) for model in ADAPTERS))
    await asyncio.to_thread(wait_for_silence, product)
    running = [asyncio.create_task(stream(product, model, tokens=TOKENS)) for model in ADAPTERS]
    await asyncio.to_thread(wait_for_streams, product, len(running))  # all are placed before the cut
    addresses = _addresses(product, product.runners()[0]["metadata"]["name"])
    with cluster.network.cut(addresses["gateway"], addresses["scheduler"]):
        waiting = [asyncio.create_task(stream(product, model, tokens=20)) for model in ADAPTERS]
        answers = await asyncio.gather(*running)
        assert not any(one.done() for one in waiting), "no scheduler could place them"
    late = await asyncio.gather(*waiting)
    assert [one.problem for one in (*answers, *late) if not one.complete] == []
    assert [one.text for one in answers] == [one.text for one in undisturbed]
    assert [one.tokens for one in late] == [20] * len(ADAPTERS)


def _wait_for_a_trace(product: Product, scheduler: str, cut_off: str) -> None:
    """Wait until a service has noticed that a runner is cut off from the scheduler or from a gateway."""
    name = "motet_attached_runners" if cut_off == "scheduler" else "motet_lost_placements_total"
    before = metric(f"{scheduler}:9090", name)
    product.cluster.wait_for(lambda: metric(f"{scheduler}:9090", name) != before, f"a change of {name}", within_s=60)


def _addresses(product: Product, runner: str) -> dict[str, str]:
    """The addresses of a runner, the gateway, and the leading scheduler."""
    lease = product.cluster.get("lease", f"{RELEASE}-scheduler", f"--namespace={SYSTEM}")
    leader = lease["spec"]["holderIdentity"].rpartition("-")[0]
    pods = {pod["metadata"]["name"]: pod for pod in product.cluster.items("pods", f"--namespace={SYSTEM}")}
    return {
        "runner": next(pod["status"]["podIP"] for pod in product.runners() if pod["metadata"]["name"] == runner),
        "gateway": product.gateway().partition(":")[0],
        "scheduler": pods[leader]["status"]["podIP"],
    }
