"""The operator's API client: all its requests, rate-limited and counted, with plain dictionaries."""

import asyncio
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlencode

from motet import kube
from motet.clock import Clock, monotonic
from motet.kube import (
    CONFLICT,
    FORBIDDEN,
    INVALID,
    NOT_FOUND,
    THROTTLED,
    ApiConnection,
    ApiResponse,
    KubeCredentials,
    Unreachable,
)
from motet_operator.cluster.kinds import Kind, Object
from motet_operator.metrics import ClusterMetrics

CHUNK = 500
"""Objects in one answer to a LIST."""

APPLY = "application/apply-patch+yaml"


class NotLeading(kube.ApiError):
    """The request was not sent: another replica may be the leader by now."""


class ApiRefused(kube.StatusError):
    """The API server refused a request."""

    def __init__(
        self, verb: str, kind: Kind, namespace: str, *, status: int, message: str, subresource: bool = False
    ) -> None:
        super().__init__(status, message)
        self.verb, self.kind, self.namespace, self.subresource = verb, kind, namespace, subresource

    @property
    def forbidden(self) -> bool:
        return self.status == FORBIDDEN

    @property
    def gone(self) -> bool:
        """The object or its kind does not exist."""
        return self.status == NOT_FOUND

    @property
    def conflict(self) -> bool:
        return self.status in (CONFLICT, INVALID)


class RequestLimiter:
    """Limits the rate of requests: a token bucket, and a pause when the server asks for one.

    `burst` requests at once, then `rate` per second, in the order of their arrival.
    """

    def __init__(self, rate: float, burst: float, clock: Clock = monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._tokens = burst
        self._counted = clock()
        self._paused_until = 0.0

    def reserve(self) -> float:
        """Take a token. Returns the seconds after which it may be used."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._counted) * self._rate) - 1
        self._counted = now
        return max(0.0, -self._tokens / self._rate, self._paused_until - now)

    def pause(self, seconds: float) -> None:
        """Send nothing for this time: the server answered 429."""
        self._paused_until = max(self._paused_until, self._clock() + seconds)

    async def take(self) -> None:
        wait = self.reserve()
        while wait > 0:
            await asyncio.sleep(wait)
            # Meanwhile the server may have asked for a pause.
            wait = self._paused_until - self._clock()


class Api:
    def __init__(
        self,
        credentials: KubeCredentials,
        limiter: RequestLimiter,
        metrics: ClusterMetrics,
        *,
        request_seconds: float = 30.0,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """While `may_write` returns False, only reading requests are sent."""
        self._connection = ApiConnection(credentials)
        self._limiter = limiter
        self._metrics = metrics
        self._seconds = request_seconds
        self._may_write = may_write
        self.answered_at = time.monotonic()
        """When the server last answered."""

    async def close(self) -> None:
        await self._connection.close()

    # ----------------------------------------------------------------------------------------------------- requests

    async def list(
        self, kind: Kind, namespace: str = "", *, selector: str = "", fields: str = "", fresh: bool = False
    ) -> tuple[list[Object], int]:
        """All objects with these labels and fields, and the list's version. `fresh` reads the store, not the server's
        cache."""
        items: list[Object] = []
        query = {"limit": str(CHUNK)} if fresh else {"resourceVersion": "0"}
        if selector:
            query["labelSelector"] = selector
        if fields:
            query["fieldSelector"] = fields
        while True:
            answer = await self._request("list", kind, "GET", kind.path(namespace), query, namespace=namespace)
            if "items" not in answer:
                raise Unreachable(f"the API server's answer is no list of {kind.resource}")
            for item in answer["items"] or ():
                item.setdefault("apiVersion", kind.api_version)
                item.setdefault("kind", kind.name)
                items.append(item)
            metadata = answer.get("metadata", {})
            if not metadata.get("continue"):
                return items, int(metadata.get("resourceVersion") or 0)
            query = {key: value for key, value in query.items() if key != "resourceVersion"}
            query["continue"] = metadata["continue"]

    async def newest(self, kind: Kind, namespace: str = "") -> int:
        """The version of the store, not of the server's cache."""
        answer = await self._request("list", kind, "GET", kind.path(namespace), {"limit": "1"}, namespace=namespace)
        return int(answer.get("metadata", {}).get("resourceVersion") or 0)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        try:
            return await self._request("get", kind, "GET", kind.path(namespace, name), {}, namespace=namespace)
        except ApiRefused as error:
            if error.gone:
                return None
            raise

    async def verbs(self, kind: Kind) -> frozenset[str]:
        """The verbs of a kind. Empty if it is not served; without `create` while its definition is being deleted."""
        path = kind.path().rpartition("/")[0]
        try:
            answer = await self._request("discover", kind, "GET", path, {})
        except ApiRefused as error:
            if error.gone:
                return frozenset()
            raise
        if "resources" not in answer:
            raise Unreachable(f"the API server's answer is no list of what it serves beside {kind.resource}")
        found = [one for one in answer["resources"] or () if one.get("name") == kind.plural]
        return frozenset(found[0].get("verbs", ())) if found else frozenset()

    async def apply(
        self, kind: Kind, document: Object, *, manager: str, subresource: str = "", force: bool = True
    ) -> Object:
        """Server-side apply, by default with force: the fields that we write are ours, whoever changed them."""
        metadata = document["metadata"]
        namespace = metadata.get("namespace", "")
        query = {"fieldManager": manager} | ({"force": "true"} if force else {})
        path = kind.path(namespace, metadata["name"], subresource)
        return await self._request("patch", kind, "PATCH", path, query, document, namespace=namespace, content=APPLY)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, version: int = 0) -> None:
        """Deletes the object with this uid, and only in this `version` if given. No error if it is already gone."""
        preconditions = {"uid": uid} | ({"resourceVersion": str(version)} if version else {})
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        path = kind.path(namespace, name)
        try:
            await self._request("delete", kind, "DELETE", path, {}, body, namespace=namespace)
        except ApiRefused as error:
            if not error.gone:
                raise

    # --------------------------------------------------------------------------------------------------- the one way

    async def _request(  # noqa: PLR0917
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
        await self._limiter.take()
        # The wait may take a minute, and this replica may no longer be the leader.
        if method != "GET" and not self._may_write():
            raise NotLeading(f"{verb} {kind}")
        began = time.perf_counter()
        try:
            answer = await self._connection.send(method, target, body, content=content, seconds=self._seconds)
        except Unreachable:
            self._metrics.api_requests.labels(verb, kind.plural, "none").inc()
            raise
        self._metrics.api_seconds.labels(verb, kind.plural).observe(time.perf_counter() - began)
        self._metrics.api_requests.labels(verb, kind.plural, str(answer.status)).inc()
        self.answered_at = time.monotonic()
        if 200 <= answer.status < 300:
            return answer.body
        if answer.status == THROTTLED:
            self._limiter.pause(_pause(answer))
        subresource = path.endswith("/status")
        raise ApiRefused(verb, kind, namespace, status=answer.status, message=answer.message, subresource=subresource)


def _pause(answer: ApiResponse) -> float:
    said = answer.retry_after or (answer.body.get("details") or {}).get("retryAfterSeconds") or 1
    try:
        return min(60.0, max(0.0, float(said)))
    except (TypeError, ValueError):
        return 1.0
