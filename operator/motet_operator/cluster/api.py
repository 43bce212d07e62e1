"""The one door to the API server, and the one module that knows the `kubernetes` package.

Plain dictionaries in and out: its models are strict, and a field that a newer server adds would be an error.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

import aiohttp
import orjson
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from motet.errors import SetupError
from motet_operator.cluster.kinds import Kind, Object
from motet_operator.cluster.limiter import Limiter
from motet_operator.metrics import ClusterMetrics

CHUNK = 500
"""Objects in one answer to a LIST."""

UNAUTHORIZED, THROTTLED = 401, 429

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """What came of a request that was not carried out."""


class Unreachable(ApiError):
    """No answer: nobody knows whether it was carried out."""


class Refused(ApiError):
    """The server's no."""

    def __init__(
        self, verb: str, kind: Kind, namespace: str, *, status: int, message: str, subresource: bool = False
    ) -> None:
        super().__init__(message or f"HTTP {status}")
        self.verb, self.kind, self.namespace, self.subresource = verb, kind, namespace, subresource
        self.status, self.message = status, message

    @property
    def forbidden(self) -> bool:
        return self.status == 403

    @property
    def gone(self) -> bool:
        """There is no such object, or no such kind."""
        return self.status == 404

    @property
    def conflict(self) -> bool:
        return self.status in (409, 422)


class Credentials:
    """Who we are to the API server. A token is read again when it is old, and at once when it was refused."""

    TOKEN_LIFE_SECONDS = 60.0
    LEAST_SECONDS_BETWEEN = 1.0

    def __init__(self, kubeconfig: Path | None) -> None:
        self._kubeconfig = kubeconfig
        self._configuration: Configuration | None = None
        self._read_at = 0.0
        self._reading = asyncio.Lock()

    async def configuration(self, *, refused: bool = False) -> Configuration:
        """Raises SetupError at the first reading, when there is nothing to read."""
        async with self._reading:
            age = time.monotonic() - self._read_at
            if self._configuration is not None and age < self.LEAST_SECONDS_BETWEEN and refused:
                await asyncio.sleep(self.LEAST_SECONDS_BETWEEN - age)
            if self._configuration is None or refused or age > self.TOKEN_LIFE_SECONDS:
                await self._read()
            assert self._configuration is not None
            return self._configuration

    async def _read(self) -> None:
        # Else each request would look for a proxy in files and variables, in a thread.
        configuration = Configuration(client_session_kwargs={"trust_env": False})
        try:
            if self._kubeconfig is not None:
                await kube_config.load_kube_config(str(self._kubeconfig), client_configuration=configuration)
            else:
                kube_config.load_incluster_config(configuration, try_refresh_token=False)
        except (kube_config.ConfigException, OSError) as error:
            if self._configuration is None:
                raise SetupError(
                    f"cannot reach a cluster: {error}. Run in a pod with a ServiceAccount token, or set "
                    "MOTET_CLUSTER_KUBECONFIG."
                ) from None
            return  # what we have may still do
        finally:
            self._read_at = time.monotonic()
        self._configuration = configuration


def authorization(configuration: Configuration) -> dict[str, str]:
    token = configuration.api_key.get("BearerToken", "")
    return {"Authorization": f"Bearer {token.split(' ', 1)[-1].strip()}"} if token else {}


def ssl_context(configuration: Configuration) -> ssl.SSLContext:
    context: ssl.SSLContext = RESTClientObject(configuration).ssl_context
    return context


class Api:
    def __init__(
        self,
        credentials: Credentials,
        limiter: Limiter,
        metrics: ClusterMetrics,
        *,
        request_seconds: float = 30.0,
    ) -> None:
        self._credentials = credentials
        self._limiter = limiter
        self._metrics = metrics
        self._timeout = aiohttp.ClientTimeout(total=request_seconds, sock_connect=5)
        self._client: RESTClientObject | None = None
        self._connected_by: tuple[object, ...] = ()
        self.answered_at = time.monotonic()
        """When the server last said anything to us."""

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    # ----------------------------------------------------------------------------------------------------- requests

    async def list(
        self, kind: Kind, namespace: str = "", *, selector: str = "", fresh: bool = False
    ) -> tuple[list[Object], int]:
        """All objects, and the version of the whole. `fresh` asks what is stored, not what the server has cached."""
        items: list[Object] = []
        query = {"limit": str(CHUNK)} if fresh else {"resourceVersion": "0"}
        if selector:
            query["labelSelector"] = selector
        while True:
            answer = await self._ask("list", kind, "GET", kind.path(namespace), query, namespace=namespace)
            for item in answer.get("items") or ():
                item.setdefault("apiVersion", kind.api_version)
                item.setdefault("kind", kind.name)
                items.append(item)
            metadata = answer.get("metadata", {})
            if not metadata.get("continue"):
                return items, int(metadata.get("resourceVersion") or 0)
            query = {key: value for key, value in query.items() if key != "resourceVersion"}
            query["continue"] = metadata["continue"]

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        try:
            return await self._ask("get", kind, "GET", kind.path(namespace, name), {}, namespace=namespace)
        except Refused as error:
            if error.gone:
                return None
            raise

    async def verbs(self, kind: Kind) -> frozenset[str]:
        """What may be done with a kind now. Empty: it is not served. One that is being removed cannot be created."""
        path = kind.path().rpartition("/")[0]
        try:
            answer = await self._ask("discover", kind, "GET", path, {})
        except Refused as error:
            if error.gone:
                return frozenset()
            raise
        found = [one for one in answer.get("resources", ()) if one.get("name") == kind.plural]
        return frozenset(found[0].get("verbs", ())) if found else frozenset()

    async def apply(self, kind: Kind, document: Object, *, manager: str, subresource: str = "") -> Object:
        """Server-side apply, by force: what we write is ours by contract."""
        metadata = document["metadata"]
        namespace = metadata.get("namespace", "")
        query = {"fieldManager": manager, "force": "true"}
        path = kind.path(namespace, metadata["name"], subresource)
        return await self._ask("patch", kind, "PATCH", path, query, document, namespace=namespace, content=APPLY)

    async def create(self, kind: Kind, document: Object, *, manager: str) -> Object:
        namespace = document["metadata"].get("namespace", "")
        query = {"fieldManager": manager}
        return await self._ask("create", kind, "POST", kind.path(namespace), query, document, namespace=namespace)

    async def merge(self, kind: Kind, namespace: str, name: str, document: Object, *, manager: str) -> Object:
        query = {"fieldManager": manager}
        path = kind.path(namespace, name)
        return await self._ask("patch", kind, "PATCH", path, query, document, namespace=namespace, content=MERGE)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, version: int = 0) -> None:
        """Only this very object, and only as it was seen where `version` is given. One that is gone is no error."""
        preconditions = {"uid": uid} | ({"resourceVersion": str(version)} if version else {})
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        path = kind.path(namespace, name)
        try:
            await self._ask("delete", kind, "DELETE", path, {}, body, namespace=namespace)
        except Refused as error:
            if not error.gone:
                raise

    # --------------------------------------------------------------------------------------------------- the one way

    async def _ask(  # noqa: PLR0917
        self,
        verb: str,
        kind: Kind,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None = None,
        *,
        namespace: str = "",
        content: str = "application/json",
    ) -> Object:
        target = f"{path}?{urlencode(query)}" if query else path
        status, answer = UNAUTHORIZED, Object()
        for again in (False, True):
            await self._limiter.take()
            began = time.perf_counter()
            try:
                status, answer = await self._send(method, target, body, content, refused=again)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._metrics.api_requests.labels(verb, kind.plural, "none").inc()
                raise Unreachable(f"{type(error).__name__}: {error}") from error
            self._metrics.api_seconds.labels(verb, kind.plural).observe(time.perf_counter() - began)
            self._metrics.api_requests.labels(verb, kind.plural, str(status)).inc()
            if status != UNAUTHORIZED:
                break
        self.answered_at = time.monotonic()
        if 200 <= status < 300:
            return answer
        message = str(answer.get("message") or answer.get("reason") or "")
        raise Refused(verb, kind, namespace, status=status, message=message, subresource=path.endswith("/status"))

    async def _send(
        self, method: str, target: str, body: Object | None, content: str, *, refused: bool
    ) -> tuple[int, Object]:
        configuration, client = await self._connected(refused=refused)
        headers = {"Accept": "application/json", "Content-Type": content, **authorization(configuration)}
        response = await client.request(
            method, f"{configuration.host}{target}", headers=headers, body=body, _request_timeout=self._timeout
        )
        async with response.response:
            data = await response.read()
        try:
            answer = orjson.loads(data) if data else {}
        except orjson.JSONDecodeError:
            answer = {"message": data[:200].decode(errors="replace")}
        if response.status == THROTTLED:
            self._limiter.pause(_seconds(response.headers.get("Retry-After"), answer))
        return int(response.status), answer if isinstance(answer, dict) else {}

    async def _connected(self, *, refused: bool) -> tuple[Configuration, RESTClientObject]:
        configuration = await self._credentials.configuration(refused=refused)
        by = (configuration.host, configuration.ssl_ca_cert, configuration.cert_file, configuration.key_file)
        if self._client is None or self._connected_by != by:
            before, self._client, self._connected_by = self._client, RESTClientObject(configuration), by
            if before is not None:
                await before.close()
        return configuration, self._client


def _seconds(header: str | None, answer: Object) -> float:
    said = header or (answer.get("details") or {}).get("retryAfterSeconds") or 1
    try:
        return min(60.0, max(0.0, float(said)))
    except (TypeError, ValueError):
        return 1.0


__all__ = ["Api", "ApiError", "Credentials", "Refused", "Unreachable", "authorization", "ssl_context"]
