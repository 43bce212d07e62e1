"""What probes and hooks do with a container: call it over HTTP, TCP or gRPC, run a command in it, or wait."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from testbed.cluster.api import Object

Execute = Callable[[list[str], float], Awaitable[tuple[int, str]]]

_PART_BYTES = 65536
_UNVERIFIED = ssl.create_default_context()
_UNVERIFIED.check_hostname, _UNVERIFIED.verify_mode = False, ssl.CERT_NONE


class ActionFailed(Exception):
    """The action failed. The text is that of the event."""


async def act(action: Object, container: Object, address: str, execute: Execute, timeout_s: float) -> None:
    """Raises ActionFailed."""
    try:
        async with asyncio.timeout(timeout_s):
            if "exec" in action:
                await _execute(action["exec"]["command"], execute, timeout_s)
            elif "httpGet" in action:
                await _http(action["httpGet"], container, address)
            elif "tcpSocket" in action:
                host = action["tcpSocket"].get("host") or address
                _, writer = await asyncio.open_connection(host, port(action["tcpSocket"]["port"], container))
                writer.close()
            elif "grpc" in action:
                await _grpc(action["grpc"], address, timeout_s)
            elif "sleep" in action:
                await asyncio.sleep(action["sleep"]["seconds"])
    except TimeoutError as error:
        raise ActionFailed(f"timed out after {timeout_s:g} s") from error
    except ActionFailed:
        raise
    except Exception as error:  # any error means that the probe failed
        raise ActionFailed(str(error) or type(error).__name__) from error


def port(given: int | str, container: Object) -> int:
    """The number of a port that is given as a number or by its name in the container."""
    if isinstance(given, int):
        return given
    named = {one.get("name"): one["containerPort"] for one in container.get("ports") or ()}
    if given not in named:
        raise ActionFailed(f"there is no port called {given}")
    return int(named[given])


async def _execute(command: list[str], execute: Execute, timeout_s: float) -> None:
    code, said = await execute(command, timeout_s)
    if code != 0:
        raise ActionFailed(said.strip() or f"command exited with {code}")


async def _http(action: Object, container: Object, address: str) -> None:
    """Without a client library: probes are most of what a kubelet of the tests computes."""
    scheme, host = action.get("scheme", "HTTP").lower(), action.get("host") or address
    number, path = port(action["port"], container), action.get("path") or "/"
    headers = {"Host": f"{host}:{number}", "User-Agent": "kube-probe/1.36", "Connection": "close"}
    headers |= {one["name"]: one["value"] for one in action.get("httpHeaders") or ()}
    lines = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    try:
        reader, writer = await asyncio.open_connection(host, number, ssl=_UNVERIFIED if scheme == "https" else None)
        try:
            writer.write("\r\n".join(lines).encode())
            _, status, *_ = (await reader.readline()).split(maxsplit=2)
            while await reader.read(_PART_BYTES):
                pass  # a server may not be cut off in its answer
        finally:
            writer.close()
    except (OSError, ValueError) as error:
        raise ActionFailed(f'Get "{scheme}://{host}:{number}{path}": {error}') from error
    if not 200 <= int(status) < 400:
        raise ActionFailed(f"HTTP probe failed with statuscode: {int(status)}")


async def _grpc(action: Object, address: str, timeout_s: float) -> None:
    async with grpc.aio.insecure_channel(f"{address}:{action['port']}") as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=action.get("service") or ""), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise ActionFailed(f"{error.code().name}: {error.details()}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise ActionFailed(f"service unhealthy (responded with {name!r})")
