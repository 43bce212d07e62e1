"""The one door to the API server: what the operator may ask, paced, counted, and as plain dictionaries."""

import time
from collections.abc import Mapping
from urllib.parse import urlencode

from motet import kube
from motet.kube import CONFLICT, FORBIDDEN, INVALID, NOT_FOUND, THROTTLED, Answer, Connection, Credentials, Unreachable
from motet_operator.cluster.kinds import Kind, Object
from motet_operator.cluster.limiter import Limiter
from motet_operator.metrics import ClusterMetrics

CHUNK = 500
"""Objects in one answer to a LIST."""

APPLY = "application/apply-patch+yaml"


class Refused(kube.Refused):
    """The server's no, and to what."""

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
        """There is no such object, or no such kind."""
        return self.status == NOT_FOUND

    @property
    def conflict(self) -> bool:
        return self.status in (CONFLICT, INVALID)


class Api:
    def __init__(
        self,
        credentials: Credentials,
        limiter: Limiter,
        metrics: ClusterMetrics,
        *,
        request_seconds: float = 30.0,
    ) -> None:
        self._connection = Connection(credentials)
        self._limiter = limiter
        self._metrics = metrics
        self._seconds = request_seconds
        self.answered_at = time.monotonic()
        """When the server last said anything to us."""

    async def close(self) -> None:
        await self._connection.close()

    # ----------------------------------------------------------------------------------------------------- requests

    async def list(
        self, kind: Kind, namespace: str = "", *, selector: str = "", fields: str = "", fresh: bool = False
    ) -> tuple[list[Object], int]:
        """All objects with these labels and fields, and the version of the whole. `fresh` asks what is stored, not what
        the server has cached."""
        items: list[Object] = []
        query = {"limit": str(CHUNK)} if fresh else {"resourceVersion": "0"}
        if selector:
            query["labelSelector"] = selector
        if fields:
            query["fieldSelector"] = fields
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
        await self._limiter.take()
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
        raise Refused(verb, kind, namespace, status=answer.status, message=answer.message, subresource=subresource)


def _pause(answer: Answer) -> float:
    said = answer.retry_after or (answer.body.get("details") or {}).get("retryAfterSeconds") or 1
    try:
        return min(60.0, max(0.0, float(said)))
    except (TypeError, ValueError):
        return 1.0
