"""A network of its own for each run: one namespace, whose loopback carries the addresses of nodes, pods and services.

Every pod has an address and every port is free, as on a real cluster; nothing outside can be reached from inside, and
nothing of it is seen outside. The namespace has no name: it ends with the last process that is in it.

    10.244.255.1      the API server (and etcd, and the controllers)
    10.244.255.1<n>   node n, whose pods have 10.244.<n>.0/24
    10.0.0.0/24       services; of these only cluster DNS, 10.0.0.10, answers: there is no kube-proxy
"""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTROL_PLANE = "10.244.255.1"
API_PORT = 6443
SERVICES = "10.0.0.0/24"
FIRST_SERVICE = "10.0.0.1"
"""Of the range above the API server gives itself the first address, as `kubernetes.default`."""
DNS = "10.0.0.10"
CLUSTER_DOMAIN = "cluster.local"

_NEW_NETWORK = 0x40000000
_OWN = Path("/proc/thread-self/ns/net")


class CannotIsolate(Exception):
    """This process may not make namespaces. The text says what is missing."""


def node_address(number: int) -> str:
    return f"10.244.255.{10 + number}"


def pod_address(number: int, pod: int) -> str:
    return f"10.244.{number}.{pod}"


class Network:
    """One network namespace, as long as this object is open or a process is in it."""

    def __init__(self) -> None:
        if missing := [tool for tool in ("ip", "nsenter", "setpriv") if shutil.which(tool) is None]:
            raise CannotIsolate(f"{', '.join(missing)} not found: install iproute2 and util-linux")
        self._descriptor = _made_elsewhere()

    @property
    def path(self) -> Path:
        """For `nsenter --net=`, while this process lives."""
        return Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Put the calling thread into the network, with all threads and processes that it starts meanwhile."""
        before = os.open(_OWN, os.O_RDONLY)
        try:
            _enter(self._descriptor)
            try:
                yield
            finally:
                _enter(before)
        finally:
            os.close(before)

    def add_address(self, address: str) -> None:
        """Raises CalledProcessError when it is there already."""
        with self.inside():
            subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True, capture_output=True)

    def remove_address(self, address: str) -> None:
        with self.inside():
            subprocess.run(["ip", "address", "del", f"{address}/32", "dev", "lo"], check=True, capture_output=True)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


@contextmanager
def network() -> Iterator[Network]:
    """Raises CannotIsolate where this process may not."""
    made = Network()
    try:
        with made.inside():
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        for address in (CONTROL_PLANE, DNS):
            made.add_address(address)
        yield made
    finally:
        made.close()


def _made_elsewhere() -> int:
    """A descriptor of a new namespace. A thread of its own makes it, since `unshare` moves whoever calls it."""
    made: list[int | OSError] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_NETWORK) == 0:
            made.append(os.open(_OWN, os.O_RDONLY))
        else:
            made.append(OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, OSError):
        raise CannotIsolate(f"a network namespace needs root ({result.strerror})")
    return result


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns to a network namespace failed")
