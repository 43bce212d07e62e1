"""NetworkPolicies, evaluated as a network plug-in does: they allow what is needed, and nothing else."""

import ipaddress
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.charts.helm import (
    COMPONENTS,
    NAMESPACE,
    VARIANTS,
    Object,
    containers,
    named,
    of_kind,
    pod_templates,
    render,
    title,
)

PORTS = {"gateway": 8000, "scheduler": 7101, "predictor": 7102, "supervisor": 7103, "runner": 7110}
METRICS = 9090


@dataclass(frozen=True)
class Place:
    """A pod, or a machine outside the cluster if it has no namespace."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    namespace: str = ""
    address: str = "10.9.9.9"


DNS = Place("dns", (("k8s-app", "kube-dns"),), "kube-system")
STRANGER = Place("stranger", (("app", "stranger"),), "default")
PROMETHEUS = Place("prometheus", (("app", "prometheus"),), "monitoring")
API_SERVER = Place("API server", address="172.20.0.1")
DATABASE = Place("database", address="10.1.1.1")
HUB = Place("a hub", address="93.184.216.34")
NODE_METADATA = Place("a node's metadata", address="169.254.169.254")


def pods(objects: list[Object], pool_namespace: str = "motet-pools") -> dict[str, Place]:
    found = {}
    for template in pod_templates(objects).values():
        labels = template["metadata"].get("labels", {})
        if component := labels.get("app.kubernetes.io/component"):
            found[component] = Place(component, tuple(labels.items()), NAMESPACE)
    # The operator sets these labels.
    runner = {"app.kubernetes.io/component": "runner", "app.kubernetes.io/part-of": "motet", "motet.dev/pool": "base"}
    return found | {"runner": Place("runner", tuple(runner.items()), pool_namespace)}


def selects(selector: Mapping[str, object], labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", {})
    assert isinstance(wanted, dict)
    expressions = selector.get("matchExpressions", [])
    assert isinstance(expressions, list)
    assert all(one["operator"] == "In" for one in expressions)
    return wanted.items() <= labels.items() and all(labels.get(one["key"]) in one["values"] for one in expressions)


def is_peer(peer: Object, other: Place, namespace: str) -> bool:
    if "ipBlock" in peer:
        address, block = ipaddress.ip_address(other.address), peer["ipBlock"]
        inside = [address in ipaddress.ip_network(one) for one in (block["cidr"], *block.get("except", []))]
        return inside[0] and not any(inside[1:])
    if not other.namespace:
        return False
    if "namespaceSelector" in peer:
        in_namespace = selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": other.namespace})
    else:
        in_namespace = other.namespace == namespace
    return in_namespace and selects(peer.get("podSelector", {}), dict(other.labels))


def lets(policies: list[Object], who: Place, other: Place, port: int, protocol: str, *, way: str) -> bool:
    """Whether `who` may reach (Egress) or be reached by (Ingress) the other."""
    rules, peers = ("egress", "to") if way == "Egress" else ("ingress", "from")
    mine = [
        policy
        for policy in policies
        if policy["metadata"]["namespace"] == who.namespace
        and selects(policy["spec"]["podSelector"], dict(who.labels))
        and way in policy["spec"]["policyTypes"]
    ]
    return not mine or any(
        (peers not in rule or any(is_peer(peer, other, who.namespace) for peer in rule[peers]))
        and any(one["port"] == port and one["protocol"] == protocol for one in rule["ports"])
        for policy in mine
        for rule in policy["spec"].get(rules) or []
    )


def passes(objects: list[Object], source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
    policies = of_kind(objects, "NetworkPolicy")
    return lets(policies, source, target, port, protocol, way="Egress") and lets(
        policies, target, source, port, protocol, way="Ingress"
    )


def calls(objects: list[Object]) -> set[tuple[str, str]]:
    """Who calls whom: the addresses in the environment, and the gateways' streams to runners."""
    found = {("gateway", "runner")}
    for who, template in pod_templates(objects).items():
        component = template["metadata"].get("labels", {}).get("app.kubernetes.io/component", "runner")
        for container in containers(template):
            for one in container["env"]:
                if address := re.fullmatch(r"[a-z]+-([a-z]+)\.[a-z.-]+\.svc:\d+", one.get("value", "")):
                    assert address[1] in PORTS, who
                    found.add((component, address[1]))
    return found


restricted = [name for name, values in VARIANTS.items() if "enabled" not in values.get("networkPolicy", {})]
every_variant = pytest.mark.parametrize("values", [VARIANTS[name] for name in restricted], ids=restricted)


@every_variant
def test_every_pod_has_a_policy_that_denies_everything_in_both_directions(values: Object) -> None:
    objects = render(values)
    for place in pods(objects).values():
        deny = named(
            objects, "NetworkPolicy", f"{values.get('fullnameOverride', 'motet')}-default-deny", place.namespace
        )
        assert selects(deny["spec"]["podSelector"], dict(place.labels)), place.name
        assert sorted(deny["spec"]["policyTypes"]) == ["Egress", "Ingress"]
        assert not {"ingress", "egress"} & deny["spec"].keys()


@every_variant
def test_processes_reach_only_those_that_they_call(values: Object) -> None:
    objects = render(values)
    needed = calls(objects)
    assert len(needed) == 8
    for source, target in itertools.permutations(pods(objects).values(), 2):
        if target.name in PORTS:
            open_to_all = target.name == "gateway" and source.name not in COMPONENTS
            expected = (source.name, target.name) in needed
            got = passes(objects, source, target, PORTS[target.name])
            assert got == expected or (open_to_all and got), f"{source.name} → {target.name}"


@every_variant
def test_other_pods_reach_only_the_gateway(values: Object) -> None:
    objects = render(values)
    for target in pods(objects).values():
        for port in {*PORTS.values(), 22}:
            expected = (target.name, port) == ("gateway", PORTS["gateway"])
            assert passes(objects, STRANGER, target, port) == expected, f"{target.name}:{port}"


def test_clients_of_the_gateway_can_be_limited() -> None:
    clients = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    objects = render({"networkPolicy": {"clients": clients}})
    gateway = pods(objects)["gateway"]
    assert passes(objects, PROMETHEUS, gateway, 8000)
    assert not passes(objects, STRANGER, gateway, 8000)
    assert not passes(objects, HUB, gateway, 8000)


def test_metrics_are_for_the_whole_cluster_or_for_those_in_the_values() -> None:
    for peers, expected in (([{"namespaceSelector": {}}], True), ([], False)):
        objects = render({"networkPolicy": {"metrics": peers}})
        for place in pods(objects).values():
            if place.name not in ("test", "migrate"):
                assert passes(objects, PROMETHEUS, place, METRICS) == expected, place.name
                assert not passes(objects, HUB, place, METRICS), place.name


@every_variant
def test_dns_requests_go_only_to_the_cluster(values: Object) -> None:
    objects = render(values)
    for place in pods(objects).values():
        for protocol in ("UDP", "TCP"):
            assert passes(objects, place, DNS, 53, protocol), place.name
            assert not passes(objects, place, HUB, 53, protocol), place.name


@every_variant
def test_only_pods_with_a_token_reach_the_api_server(values: Object) -> None:
    objects = render(values)
    reaching = {place.name for place in pods(objects).values() if passes(objects, place, API_SERVER, 6443)}
    assert reaching == {"operator", "scheduler", "runner", "test"}


def test_access_to_the_api_server_can_be_limited() -> None:
    objects = render(
        {"networkPolicy": {"apiServer": {"to": [{"ipBlock": {"cidr": "172.20.0.1/32"}}], "ports": [6443]}}}
    )
    operator = pods(objects)["operator"]
    assert passes(objects, operator, API_SERVER, 6443)
    assert not passes(objects, operator, API_SERVER, 443)
    assert not passes(objects, operator, HUB, 6443)


def test_runners_fetch_only_from_public_addresses() -> None:
    """Also by default, although the rule for the API server then allows all addresses."""
    for narrowed in ({}, {"apiServer": {"to": [{"ipBlock": {"cidr": "172.20.0.1/32"}}]}}):
        objects = render({"networkPolicy": narrowed})
        runner = pods(objects)["runner"]
        assert passes(objects, runner, HUB, 443)
        for forbidden in (DATABASE, NODE_METADATA, STRANGER, API_SERVER):
            assert not passes(objects, runner, forbidden, 443), forbidden.name
        assert not passes(objects, runner, HUB, 80)


def test_only_runners_fetch_if_access_to_the_api_server_is_limited() -> None:
    objects = render({"networkPolicy": {"apiServer": {"to": [{"ipBlock": {"cidr": "172.20.0.1/32"}}]}}})
    assert {place.name for place in pods(objects).values() if passes(objects, place, HUB, 443)} == {"runner"}


def test_runners_reach_the_api_server_at_the_ports_in_the_values() -> None:
    for ports in ([443, 6443], [443], []):
        narrow = {"to": [{"ipBlock": {"cidr": "172.20.0.1/32"}}], "runnerPorts": ports}
        objects = render({"networkPolicy": {"apiServer": narrow}})
        runner = pods(objects)["runner"]
        assert [port for port in (443, 6443) if passes(objects, runner, API_SERVER, port)] == ports
        assert not passes(objects, runner, HUB, 6443)


def test_without_sources_runners_reach_nothing_outside() -> None:
    objects = render({"networkPolicy": {"adapterSources": {"to": []}}})
    for port in (80, 443, 8443):
        assert not passes(objects, pods(objects)["runner"], HUB, port)


def test_only_components_that_use_the_database_reach_it() -> None:
    who = {"gateway", "predictor", "migrate"}
    for database, expected in (({}, set()), ({"url": "postgresql+asyncpg://db/motet"}, who)):
        objects = render({"database": database})
        reaching = {place.name for place in pods(objects).values() if passes(objects, place, DATABASE, 5432)}
        assert reaching == expected


def test_every_pool_namespace_has_the_same_policies() -> None:
    objects = render({"pools": {"namespaces": ["a", "b"]}})
    for namespace in ("a", "b"):
        runner, others = pods(objects, namespace)["runner"], pods(objects)
        assert passes(objects, others["gateway"], runner, 7110)
        assert passes(objects, runner, others["scheduler"], 7101)
        assert not passes(objects, STRANGER, runner, 7110)
    elsewhere = Place("runner", pods(objects)["runner"].labels, "c")
    assert not passes(objects, elsewhere, others["scheduler"], 7101)


@every_variant
def test_the_policies_of_runners_stay_as_long_as_runners_do(values: Object) -> None:
    """Runners go on after an uninstallation, and after their namespace was left out of `pools.namespaces`."""
    objects = render(values)
    pools = values.get("pools", {}).get("namespaces", ["motet-pools"])
    for policy in of_kind(objects, "NetworkPolicy"):
        metadata = policy["metadata"]
        of_runners = metadata["namespace"] in pools and metadata["name"].endswith(("-runner", "-default-deny"))
        kept = metadata.get("annotations", {}).get("helm.sh/resource-policy") == "keep"
        assert kept == of_runners, title(policy)


def test_policies_can_be_switched_off() -> None:
    assert of_kind(render({"networkPolicy": {"enabled": False}}), "NetworkPolicy") == []


@every_variant
def test_every_rule_of_a_policy_names_ports(values: Object) -> None:
    """A rule without ports allows all ports."""
    for policy in of_kind(render(values), "NetworkPolicy"):
        spec = policy["spec"]
        assert all(rule.get("ports") for rule in [*(spec.get("ingress") or []), *(spec.get("egress") or [])]), title(
            policy
        )
