"""Refuses connections to addresses that a tenant must not reach: loopback, the cluster's network, cloud metadata.

The guard checks each connection of a socket, so it sees the address that is really used, after every redirect and every
change of DNS. An installed guard can't be removed, so only fetch processes install one. If a proxy makes the
connections (`proxy.py`), the guard checks the address that the proxy is given.
"""

import ipaddress
import socket
import sys
from collections.abc import Sequence
from typing import Any

from motet_runner.sources.fetch_errors import forbidden, temporary

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_UNICAST = ipaddress.ip_network("2000::/3")
"""All public IPv6 addresses of single hosts are of it."""

_NOT_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # a public address, but a cloud's internal service for its machines
        "192.0.0.0/24",  # contains a cloud's metadata service; Python versions differ in what is global
        "192.88.99.0/24",
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",
        "3fff::/20",
        "5f00::/16",
        "fec0::/10",
    )
)


Allowed = str | tuple[str, int]
"""A network (10.1.0.0/16, 10.1.2.3), the name of a host, or a host and the one port of it that is meant."""


class NetworkGuard:
    """`allowed`: what the platform trusts, although its addresses are not public."""

    def __init__(self, allowed: Sequence[Allowed]) -> None:
        self._networks: list[Network] = []
        self._hosts: list[tuple[str, int | None]] = []
        for entry in allowed:
            if isinstance(entry, tuple):
                self._hosts.append(entry)
                continue
            try:
                self._networks.append(ipaddress.ip_network(entry, strict=False))
            except ValueError:
                self._hosts.append((entry, None))

    def install(self) -> None:
        sys.addaudithook(self._hook)

    def check(self, family: int, address: Any) -> None:
        """Raises AdapterFetchFailed for an address that the tenant must not reach."""
        if family not in (socket.AF_INET, socket.AF_INET6):
            raise forbidden("The source leads to a socket of this machine, which is not allowed.")
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if is_public(found) or any(_plain(found) in network for network in self._networks):
            return
        if any(port in (None, address[1]) and _plain(found) in _resolve(host) for host, port in self._hosts):
            return
        raise forbidden(
            f"The source leads to {found}, which is not a public address. If it is a mirror of yours, the platform can "
            "add its host or network to MOTET_RUNNER_FETCH_ALLOWED_HOSTS."
        )

    def resolve(self, host: str, port: int) -> list[str]:
        """The addresses of a name. Raises AdapterFetchFailed if this port of any of these addresses must not be
        reached."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise temporary(
                f"This runner cannot resolve {host}, and it checks each address before it asks the proxy for it. If "
                "the proxy itself refuses private addresses, the platform can set MOTET_RUNNER_FETCH_PROXY_GUARDS."
            ) from None
        for family, _, _, _, address in found:
            self.check(family, address)
        return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.sendto"):
            found, address = arguments[:2]
            self.check(found.family, address)


def is_public(address: Address) -> bool:
    plain = _plain(address)
    if isinstance(plain, ipaddress.IPv6Address) and plain not in _UNICAST:
        return False  # unassigned, or another form of an IPv4 address
    return plain.is_global and not plain.is_multicast and not any(plain in network for network in _NOT_PUBLIC)


def _plain(address: Address) -> Address:
    """The IPv4 address in an IPv6 address that contains one; else the address itself"""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    inside = address.ipv4_mapped or address.sixtofour
    if inside is None and address in _NAT64:
        inside = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return inside or address


def _resolve(host: str) -> set[Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {_plain(ipaddress.ip_address(str(entry[4][0]).partition("%")[0])) for entry in found}
