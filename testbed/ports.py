"""TCP ports for servers that a test starts later, or starts again on the same port.

The kernel gives outgoing connections, and servers that ask for any port, those of its own range. A port of that range
may be taken again between its choice and the server's start, by any test that runs at the same time. So these are from
below that range.
"""

import secrets
import socket
from itertools import count
from pathlib import Path

FIRST, KERNEL_RANGE = 16384, Path("/proc/sys/net/ipv4/ip_local_port_range")

_numbers = count(secrets.randbelow(1 << 16))
"""Each process begins elsewhere, and gives no port twice before it has given all."""


def free_port() -> int:
    ports = range(FIRST, max(FIRST + 1024, int(KERNEL_RANGE.read_text().split()[0])))
    for _ in ports:
        port = ports[next(_numbers) % len(ports)]
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port from {ports[0]} to {ports[-1]} is free")
