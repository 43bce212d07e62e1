"""A separate network for each run: one namespace with the nodes, and a veth pair from it to that of each pod.

Every pod has an address and all ports, as on a real cluster. There is no connection between inside and outside. The
namespaces have no names: each ends with its last process.

    10.244.255.1      the API server (and etcd, and the controllers), on the loopback
    10.244.255.<10+n> node n, on the loopback
    10.244.<n>.<m>    pods of node n, each at the end of a veth pair
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
"""The API server takes the first address of the range above, as `kubernetes.default`."""
DNS = "10.0.0.10"
CLUSTER_DOMAIN = "cluster.local"

NEW_NETWORK = 0x40000000
_OWN = Path("/proc/thread-self/ns/net")


class CannotIsolate(Exception):
    """This process may not create namespaces. The text says what is missing."""


def node_address(number: int) -> str:
    return f"10.244.255.{10 + number}"


def pod_address(number: int, pod: int) -> str:
    return f"10.244.{number}.{pod}"


def pods_of(number: int) -> str:
    """All addresses of a node's pods."""
    return f"10.244.{number}.0/24"


class Network:
    """One network namespace. It exists while this object is open or a process is in it."""

    def __init__(self) -> None:
        if missing := [tool for tool in ("ip", "nsenter", "setpriv") if shutil.which(tool) is None]:
            raise CannotIsolate(f"{', '.join(missing)} not found: install iproute2 and util-linux")
        self._descriptor = new_namespace()

    @property
    def path(self) -> Path:
        """The path for `nsenter --net=`, while this process lives."""
        return Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Move the calling thread into the network, with all threads and processes that it starts meanwhile."""
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
        """Raises CalledProcessError if the address exists already."""
        self.ip("address", "add", f"{address}/32", "dev", "lo")

    @contextmanager
    def cut(self, one: str, other: str = "0.0.0.0/0", *, both: bool = True) -> Iterator[None]:
        """Drop everything between these addresses (or ranges) without an error. If not `both`, drop only what the first
        sends to the other."""
        rules = [["from", one, "to", other], *([["from", other, "to", one]] if both else [])]
        for rule in rules:
            self.ip("rule", "add", "pref", "50", *rule, "blackhole")
        try:
            yield
        finally:
            for rule in rules:
                self.ip("rule", "del", "pref", "50", *rule, "blackhole")

    def ip(self, *arguments: str) -> None:
        """Raises CalledProcessError."""
        with self.inside():
            subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._descriptor)


@contextmanager
def network() -> Iterator[Network]:
    """Raises CannotIsolate if this process lacks permission."""
    made = Network()
    try:
        try:
            _furnish(made)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CannotIsolate(f"a network namespace cannot be furnished here: {error}") from error
        yield made
    finally:
        made.close()


def _furnish(made: Network) -> None:
    made.ip("link", "set", "lo", "up")
    with made.inside():
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    # The kernel looks up local addresses before all rules; the rules of `cut` must come before that.
    made.ip("rule", "add", "pref", "100", "lookup", "local")
    made.ip("rule", "del", "pref", "0")
    for address in (CONTROL_PLANE, DNS):
        made.add_address(address)


def new_namespace() -> int:
    """Its descriptor. A new thread creates it, since `unshare` moves the calling thread. Raises CannotIsolate."""
    made: list[int | OSError] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEW_NETWORK) == 0:
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
    if libc.setns(descriptor, NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns to a network namespace failed")
