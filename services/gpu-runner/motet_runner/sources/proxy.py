"""Fetches through a proxy, while this process still decides which addresses are allowed.

A proxy that gets a name resolves the name itself, and the network guard of this process sees only the proxy's address.
So this process resolves the name, checks the address, and asks the proxy for that address. TLS still checks the name.
Redirects are checked, too: each new host is a new connection.
"""

import base64
import ssl
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

import httpcore2

from motet_runner.sources.network_guard import NetworkGuard

MAX_ADDRESSES_TRIED = 4
MAX_ANSWER_BYTES = 16 << 10
"""The most bytes of the proxy's answer, which is a status and some headers."""


class Tunnel(httpcore2.NetworkBackend):
    """Connects through a proxy. Without a guard the proxy gets names, and is trusted to refuse addresses itself."""

    def __init__(self, proxy: str, guard: NetworkGuard | None, trust: ssl.SSLContext) -> None:
        parts = urlsplit(proxy)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._guard = guard
        self._trust = trust
        self._authorization = ""
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._authorization = f"Proxy-Authorization: Basic {base64.b64encode(secret).decode()}\r\n"
        self._direct = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        targets = [host] if self._guard is None else self._guard.resolve(host, port)[:MAX_ADDRESSES_TRIED]
        while True:
            target = targets.pop(0)
            try:
                stream = self._direct.connect_tcp(self._host, self._port, timeout, local_address, socket_options)
                return self._open_tunnel(stream, target, port, timeout)
            except httpcore2.ProxyError:
                if not targets:
                    raise

    def _open_tunnel(
        self, stream: httpcore2.NetworkStream, target: str, port: int, timeout: float | None
    ) -> httpcore2.NetworkStream:
        try:
            if self._secure:
                stream = stream.start_tls(self._trust, self._host, timeout)
            end = f"[{target}]:{port}" if ":" in target else f"{target}:{port}"
            stream.write(f"CONNECT {end} HTTP/1.1\r\nHost: {end}\r\n{self._authorization}\r\n".encode("ascii"), timeout)
            status = _status(stream, timeout)
            if not 200 <= status < 300:
                raise httpcore2.ProxyError(f"the proxy answers {status} when asked for {end}")
        except BaseException:
            stream.close()
            raise
        return stream


def _status(stream: httpcore2.NetworkStream, timeout: float | None) -> int:
    head = b""
    while not head.endswith(b"\r\n\r\n"):  # nothing follows: the server waits for the client to begin
        chunk = stream.read(4096, timeout)
        head += chunk
        if not chunk or len(head) > MAX_ANSWER_BYTES:
            raise httpcore2.ProxyError("the proxy does not send a valid HTTP answer")
    version, _, rest = head.partition(b" ")
    status = rest[:3]
    if not version.startswith(b"HTTP/1.") or not status.isdigit():
        raise httpcore2.ProxyError("the proxy does not send a valid HTTP answer")
    return int(status)
