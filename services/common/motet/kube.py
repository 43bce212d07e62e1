"""A client of the API server: credentials, a connection that is made again when needed, and objects as dictionaries.

Of the `kubernetes` package only the credentials and the connections are used. Its models are strict, so a new field of
a newer server would be an error. It is imported only when Motet uses a cluster, so a local stack does not load it.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import orjson

from motet.errors import SetupError

if TYPE_CHECKING:
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.client.rest import RESTClientObject

KubeObject = dict[str, Any]

UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, INVALID, THROTTLED = 401, 403, 404, 409, 422, 429

AUDIT_ID = "Audit-Id"
"""A header of all that the API server answers. A 404 without it may be a proxy's: of a path that it does not serve,
such as that of a kind whose definition is deleted, the server says what any in Go would (`404 page not found`)."""


class ApiError(Exception):
    """A request that failed."""


class Unreachable(ApiError):
    """The API server did not answer, or did not say what happened. It may have carried out the request."""


class StatusError(ApiError):
    """The API server refused the request, with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message or f"HTTP {status}")
        self.status, self.message = status, message


class KubeCredentials:
    """Our credentials for the API server: of the pod's ServiceAccount, or from a kubeconfig. They are read again every
    minute, and at once after the server has refused them."""

    MAX_AGE_SECONDS = 60.0
    MIN_SECONDS_BETWEEN_READS = 1.0

    def __init__(self, kubeconfig: Path | None, setting: str) -> None:
        """`setting` is the name of the setting for `kubeconfig`, for error messages."""
        self._kubeconfig, self._setting = kubeconfig, setting
        self._configuration: Configuration | None = None
        self._read_at = 0.0
        self._reading = asyncio.Lock()

    async def configuration(self, *, refused: bool = False) -> "Configuration":
        """`refused`: the server has refused the last credentials. Raises SetupError if none could ever be read."""
        async with self._reading:
            age = time.monotonic() - self._read_at
            if self._configuration is not None and age < self.MIN_SECONDS_BETWEEN_READS and refused:
                await asyncio.sleep(self.MIN_SECONDS_BETWEEN_READS - age)
            if self._configuration is None or refused or age > self.MAX_AGE_SECONDS:
                await self._read()
            assert self._configuration is not None
            return self._configuration

    async def _read(self) -> None:
        from kubernetes.aio import config
        from kubernetes.aio.client import Configuration

        # Otherwise each request would look for a proxy in files and variables, in a thread.
        configuration = Configuration(client_session_kwargs={"trust_env": False})
        try:
            if self._kubeconfig is not None:
                await config.load_kube_config(str(self._kubeconfig), client_configuration=configuration)
            else:
                config.load_incluster_config(configuration, try_refresh_token=False)
        except (config.ConfigException, OSError) as error:
            if self._configuration is None:
                raise SetupError(
                    f"cannot reach a cluster: {error}. Run in a pod with a ServiceAccount token, or set "
                    f"{self._setting}."
                ) from None
            return  # the old credentials may still be valid
        finally:
            self._read_at = time.monotonic()
        self._configuration = configuration


def authorization(configuration: "Configuration") -> dict[str, str]:
    token = configuration.api_key.get("BearerToken", "")
    return {"Authorization": f"Bearer {token.split(' ', 1)[-1].strip()}"} if token else {}


def ssl_context(configuration: "Configuration") -> ssl.SSLContext:
    from kubernetes.aio.client.rest import RESTClientObject

    context: ssl.SSLContext = RESTClientObject(configuration).ssl_context
    return context


@dataclass(frozen=True, slots=True)
class ApiResponse:
    status: int
    body: KubeObject
    retry_after: str
    """The header Retry-After; usually empty."""

    @property
    def message(self) -> str:
        return str(self.body.get("message") or self.body.get("reason") or "")


class ApiConnection:
    """A connection for any number of requests at once. It connects again when the credentials name another server or
    other certificates, or after `close`."""

    def __init__(self, credentials: KubeCredentials) -> None:
        self._credentials = credentials
        self._client: RESTClientObject | None = None
        self._connected_by: tuple[object, ...] = ()

    async def send(
        self, method: str, target: str, body: KubeObject | None, *, seconds: float, content: str = "application/json"
    ) -> ApiResponse:
        """Raises Unreachable."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=5)
        try:
            answer = await self._once(method, target, body, content, timeout, refused=False)
            if answer.status == UNAUTHORIZED:
                answer = await self._once(method, target, body, content, timeout, refused=True)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"the API server does not answer: {type(error).__name__}: {error}") from error
        return answer

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _once(
        self, method: str, target: str, body: KubeObject | None, content: str, timeout: object, *, refused: bool
    ) -> ApiResponse:
        configuration = await self._credentials.configuration(refused=refused)
        client = await self._connected(configuration)
        headers = {"Accept": "application/json", "Content-Type": content, **authorization(configuration)}
        response = await client.request(
            method, f"{configuration.host}{target}", headers=headers, body=body, _request_timeout=timeout
        )
        async with response.response:
            data = await response.read()
        status = int(response.status)
        try:
            parsed = orjson.loads(data)
        except orjson.JSONDecodeError:
            parsed = None
        said = data[:200].decode(errors="replace").strip()
        if not isinstance(parsed, dict):
            if status < 300:  # a page of a proxy, say: taken for a list, it would say that nothing exists
                raise Unreachable(f"the API server answers {status} without an object: {said}")
            parsed = {"message": said}
        if status == NOT_FOUND and AUDIT_ID not in response.headers:
            raise Unreachable(f"{status}, and not of the API server, whose answers have an {AUDIT_ID}: {said}")
        return ApiResponse(status, parsed, response.headers.get("Retry-After") or "")

    async def _connected(self, configuration: "Configuration") -> "RESTClientObject":
        from kubernetes.aio.client.rest import RESTClientObject

        files = (configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
        by = (configuration.host, *(each and (each, _written_at(each)) for each in files))
        if self._client is None or self._connected_by != by:
            before, self._client, self._connected_by = self._client, RESTClientObject(configuration), by
            if before is not None:
                await before.close()
        return self._client


def _written_at(path: str) -> int:
    """When the file was written: certificates are renewed under the same name."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0  # the file is just being replaced, or it was a temporary one made from a kubeconfig


class KubeApi:
    """A small client, for services that need few objects."""

    def __init__(self, kubeconfig: Path | None, setting: str) -> None:
        self._credentials = KubeCredentials(kubeconfig, setting)
        self._connection = ApiConnection(self._credentials)

    async def __aenter__(self) -> Self:
        """Raises SetupError if there are no credentials for a cluster."""
        await self._credentials.configuration()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connection.close()

    async def get(self, path: str, *, seconds: float) -> KubeObject:
        return await self._ask("GET", path, None, seconds)

    async def post(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject:
        return await self._ask("POST", path, body, seconds)

    async def put(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject:
        return await self._ask("PUT", path, body, seconds)

    async def _ask(self, method: str, path: str, body: KubeObject | None, seconds: float) -> KubeObject:
        """Raises StatusError or Unreachable."""
        try:
            answer = await self._connection.send(method, path, body, seconds=seconds)
        except Unreachable:
            await self._connection.close()  # there may be another server next time, with another certificate
            raise
        if answer.status < 300:
            return answer.body
        if answer.status >= 500 or answer.status in (UNAUTHORIZED, THROTTLED):
            raise Unreachable(f"the API server answers {answer.status}: {answer.message}")
        raise StatusError(answer.status, answer.message)
