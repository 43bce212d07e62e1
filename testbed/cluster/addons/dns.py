"""Cluster DNS: `<service>.<namespace>.svc.cluster.local` gives the addresses of its ready endpoints.

A real cluster DNS gives a ClusterIP for most Services. This cluster has no kube-proxy, so nothing serves a ClusterIP.
"""

import asyncio
import ipaddress
import random
import struct
from collections.abc import Callable

from testbed.cluster.api import Mirror
from testbed.cluster.network import CLUSTER_DOMAIN

Answer = Callable[[str], list[str] | None]

TTL_S = 1
_A, _ANY, _IN = 1, 255, 1
_REFUSED_TO_KNOW = 3


class ServiceNames:
    """The addresses of a name; None if it does not exist."""

    def __init__(self, services: Mirror, slices: Mirror) -> None:
        self._services, self._slices = services, slices

    def addresses(self, name: str) -> list[str] | None:
        labels = name.lower().removesuffix(".").removesuffix(f".{CLUSTER_DOMAIN}").split(".")
        if not name.lower().rstrip(".").endswith(f".{CLUSTER_DOMAIN}") or labels[-1:] != ["svc"]:
            return None
        match labels[:-1]:
            case [_]:  # a namespace: clients ask for such names because of their search lists
                return None
            case [service, namespace]:
                return self._of(service, namespace, None)
            case [host, service, namespace]:
                return self._of(service, namespace, host) or None
        return None

    def _of(self, service: str, namespace: str, host: str | None) -> list[str] | None:
        if (namespace, service) not in self._services.objects:
            return None
        found = {
            address
            for one in list(self._slices.objects.values())
            if one["metadata"]["namespace"] == namespace
            and one["metadata"].get("labels", {}).get("kubernetes.io/service-name") == service
            for endpoint in one.get("endpoints") or ()
            if endpoint.get("conditions", {}).get("ready", True) and host in (None, endpoint.get("hostname"))
            for address in endpoint["addresses"]
        }
        return sorted(found)


class Resolver(asyncio.DatagramProtocol):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        if (said := reply(data, self._answer)) is not None:
            self._transport.sendto(said, addr)


def reply(query: bytes, answer: Answer) -> bytes | None:
    """The answer to a query with one question; None for anything else."""
    try:
        number, flags, questions = struct.unpack_from("!HHH", query)
        name, end = _name(query, 12)
        kind, family = struct.unpack_from("!HH", query, end)
    except (struct.error, IndexError, UnicodeDecodeError):
        return None
    if flags & 0x8000 or questions != 1:
        return None
    addresses = answer(name)
    code = _REFUSED_TO_KNOW if addresses is None else 0
    wanted = list(addresses or ()) if kind in (_A, _ANY) and family == _IN else []
    random.shuffle(wanted)
    wanted = wanted[:28]  # they always fit into a datagram of 512 bytes
    # An authoritative answer. It says "recursion available", so clients ask no other server.
    head = struct.pack("!HHHHHH", number, 0x8480 | flags & 0x0100 | code, 1, len(wanted), 0, 0)
    records = b"".join(
        struct.pack("!HHHIH", 0xC00C, _A, _IN, TTL_S, 4) + ipaddress.IPv4Address(one).packed for one in wanted
    )
    return head + query[12 : end + 4] + records


def _name(query: bytes, at: int) -> tuple[str, int]:
    labels = []
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    return ".".join(labels), at + 1
