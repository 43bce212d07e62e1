"""The Kubernetes API for the test cluster's own programs: JSON in, JSON out, and a watch that never ends.

It uses HTTP without a client library, which would hide what is under test.
"""

import asyncio
import base64
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import yaml

Object = dict[str, Any]

STRATEGIC = "application/strategic-merge-patch+json"
_LARGEST_OBJECT = 4 * 1024 * 1024


class ApiError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


def name_of(one: Object) -> tuple[str, str]:
    return one["metadata"].get("namespace", ""), one["metadata"]["name"]


class Api:
    """Use it with `async with`, once per program."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, self._user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.server: str = cluster["server"]
        self.authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Api":
        trust = ssl.create_default_context(cadata=self.authority)
        if "client-certificate-data" in self._user:
            with tempfile.NamedTemporaryFile() as pair:  # the ssl module reads files only
                pair.write(
                    b"\n".join(base64.b64decode(self._user[f"client-{part}-data"]) for part in ("certificate", "key"))
                )
                pair.flush()
                trust.load_cert_chain(pair.name)
        headers = {"Authorization": f"Bearer {self._user['token']}"} if "token" in self._user else {}
        self._session = aiohttp.ClientSession(
            self.server,
            headers=headers,
            connector=aiohttp.TCPConnector(ssl=trust, limit=64),
            read_bufsize=_LARGEST_OBJECT,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, **query: str) -> Object:
        return await self._call("GET", path, query=query)

    async def create(self, path: str, body: Object) -> Object:
        return await self._call("POST", path, body)

    async def replace(self, path: str, body: Object) -> Object:
        return await self._call("PUT", path, body)

    async def patch(self, path: str, body: Object) -> Object:
        return await self._call("PATCH", path, body, kind=STRATEGIC)

    async def delete(self, path: str, body: Object) -> Object:
        return await self._call("DELETE", path, body)

    async def _call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        *,
        query: Mapping[str, str] | None = None,
        kind: str = "",
    ) -> Object:
        """Raises ApiError if the server refuses, OSError or TimeoutError if it does not answer."""
        assert self._session is not None
        content = None if body is None else orjson.dumps(body)
        headers = {} if body is None else {"Content-Type": kind or "application/json"}
        timeout = aiohttp.ClientTimeout(total=10)
        try:
            async with self._session.request(
                method, path, params=query, data=content, headers=headers, timeout=timeout
            ) as answer:
                said = await answer.read()
        except aiohttp.ClientError as error:
            raise OSError(str(error)) from error
        if answer.status >= 400:
            raise ApiError(answer.status, said.decode(errors="replace"))
        result: Object = orjson.loads(said)
        return result

    async def follow(self, path: str, **query: str) -> AsyncIterator[tuple[str, Object]]:
        """Yields ADDED, MODIFIED and DELETED for every object at `path`, without end. ("SYNCED", {}) follows a list."""
        known: dict[tuple[str, str], Object] = {}
        while True:
            try:
                listed = await self.get(path, **query)
                seen = {name_of(one): one for one in listed.get("items") or ()}
                for name in known.keys() - seen.keys():
                    yield "DELETED", known.pop(name)
                for name, one in seen.items():
                    yield ("MODIFIED" if name in known else "ADDED"), one
                known = seen
                yield "SYNCED", {}
                async for kind, one in self._watch(path, listed["metadata"]["resourceVersion"], query):
                    if kind == "DELETED":
                        known.pop(name_of(one), None)
                    else:
                        known[name_of(one)] = one
                    yield kind, one
            except (
                ApiError,
                OSError,
                TimeoutError,
                ValueError,
                aiohttp.ClientError,
            ):  # the last line may be incomplete after a crash
                await asyncio.sleep(0.2)

    async def _watch(self, path: str, version: str, query: Mapping[str, str]) -> AsyncIterator[tuple[str, Object]]:
        """Runs until the server closes the watch."""
        assert self._session is not None
        ask = {**query, "watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        async with self._session.get(path, params=ask, timeout=aiohttp.ClientTimeout(sock_connect=5)) as answer:
            if answer.status != 200:
                raise ApiError(answer.status, await answer.text())
            async for line in answer.content:
                event = orjson.loads(line)
                if event["type"] == "ERROR":
                    raise ApiError(int(event["object"].get("code", 500)), event["object"].get("message", ""))
                if event["type"] != "BOOKMARK":
                    yield event["type"], event["object"]


class Mirror:
    """All objects of one kind, as a watch reports them."""

    def __init__(self, api: Api, path: str, **query: str) -> None:
        self._api, self._path, self._query = api, path, query
        self.objects: dict[tuple[str, str], Object] = {}
        self.changed = asyncio.Event()
        """For one waiting task, which clears it."""
        self.synced = asyncio.Event()

    async def run(self) -> None:
        async for kind, one in self._api.follow(self._path, **self._query):
            if kind == "SYNCED":
                self.synced.set()
            elif kind == "DELETED":
                self.objects.pop(name_of(one), None)
            else:
                self.objects[name_of(one)] = one
            self.changed.set()
