"""Network addresses: `host:port` as text, and the sockets that listen there."""

import socket
from contextlib import suppress
from ipaddress import IPv6Address
from typing import Annotated

from pydantic import AfterValidator

EVERY_ADDRESS = ("", "0.0.0.0", "::")
"""Hosts that mean all addresses of the machine."""


def host_and_port(host: str, port: int | str) -> str:
    """`host:port`, for gRPC and in URLs: both need brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bracketed(address: str) -> str:
    """The address, with brackets around an IPv6 host: `$(POD_IP):7101` has none. Others stay as they are."""
    host, _, port = address.rpartition(":")
    with suppress(ValueError):
        return host_and_port(str(IPv6Address(host)), port)
    return address


Address = Annotated[str, AfterValidator(bracketed)]
"""`unix:/path` or `host:port`, as a setting."""


def reachable_host(host: str) -> str:
    """Where this machine reaches what listens on `host`."""
    return "127.0.0.1" if host in EVERY_ADDRESS else host


def http_url(host: str, port: int) -> str:
    """The URL at which this machine reaches an HTTP server that listens on `host`."""
    return f"http://{host_and_port(reachable_host(host), port)}"


def bound_socket(host: str, port: int) -> socket.socket:
    """A TCP socket on this address. `::` is every address of both families, or all of IPv4 on a machine without IPv6.

    Raises OSError.
    """
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::")
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound
