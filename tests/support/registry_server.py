"""An OCI registry over TLS, as the distribution specification has it, with a realm that gives tokens.

async with registry_server(tmp_path) as registry:
    registry.users["me"] = "geheim"
    source = registry.publish("acme/pirate", "v1", folder)
"""

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.source_servers import ErrorStatus, WebServer, running

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
TITLE = "org.opencontainers.image.title"
EMPTY = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": f"sha256:{hashlib.sha256(b'{}').hexdigest()}"}

Change = Callable[[dict[str, Any]], object]


def digest_of(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


class RegistryServer(WebServer):
    """Blobs and manifests lie at the paths of their URLs, and faults count for those."""

    def __init__(self, ca_file: Path) -> None:
        super().__init__(ca_file)
        self.users: dict[str, str] = {}
        """Only these may pull. None: everybody may."""
        self.scheme = "Bearer"
        self.realm = ""
        """The realm's URL, if it is not this server's."""
        self.requests_per_token = 1_000_000
        self.tokens: dict[str, int] = {}
        self.token_body: bytes | None = None
        self.blobs_at = ""
        """To where a blob's request is redirected."""

    @property
    def host(self) -> str:
        return self.base.removeprefix("https://")

    def publish(self, repository: str, tag: str, folder: Path, change: Change = lambda _: None) -> str:
        """As oras does: a layer for each file. `change`: changes the manifest."""
        layers = [
            self.layer(repository, path.read_bytes(), path.name) for path in sorted(folder.iterdir()) if path.is_file()
        ]
        return self.put_manifest(repository, tag, layers, change)

    def layer(self, repository: str, body: bytes, name: str, **more: Any) -> dict[str, Any]:
        digest = digest_of(body)
        self.files[f"/v2/{repository}/blobs/{digest}"] = body
        kind = "application/vnd.oci.image.layer.v1.tar"
        return {"mediaType": kind, "digest": digest, "size": len(body), "annotations": {TITLE: name}} | more

    def put_manifest(
        self, repository: str, tag: str, layers: list[dict[str, Any]], change: Change = lambda _: None
    ) -> str:
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": EMPTY | {"size": 2}, "layers": layers}
        change(manifest)
        self.put_document(repository, json.dumps(manifest).encode(), tag)
        return f"oci://{self.host}/{repository}:{tag}"

    def put_index(self, repository: str, tag: str, digests: list[str]) -> str:
        entries = [{"mediaType": MANIFEST, "digest": digest, "size": 7} for digest in digests]
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
        return self.put_document(repository, json.dumps(index).encode(), tag)

    def put_document(self, repository: str, body: bytes, tag: str = "") -> str:
        digest = digest_of(body)
        for reference in filter(None, (tag, digest)):
            self.files[f"/v2/{repository}/manifests/{reference}"] = body
        return digest

    def digest(self, repository: str, tag: str) -> str:
        return digest_of(self.files[f"/v2/{repository}/manifests/{tag}"])

    @property
    def manifests_asked(self) -> list[str]:
        return [one.path.rpartition("/")[2] for one in self.asked if "/manifests/" in one.path]

    async def serve(self, request: web.Request, path: str, headers: dict[str, str] | None = None) -> web.StreamResponse:
        fault = self.faults.get(path)
        if not (isinstance(fault, ErrorStatus) and fault.times > 0):
            if path == "/token":
                return self._give_token(request)
            if self.users and not self._opens(request):
                words = f'{self.scheme} realm="{self.realm or self.base + "/token"}",service="it",scope="wide"'
                return web.Response(status=401, headers={"WWW-Authenticate": words})
            if self.blobs_at and "/blobs/" in path:
                return web.Response(status=307, headers={"Location": self.blobs_at + path})
        more: dict[str, str] = {}
        if "/manifests/" in path and path in self.files:
            more["Content-Type"] = str(_type_of(self.files[path]))
        return await super().serve(request, path, more)

    def _opens(self, request: web.Request) -> bool:
        given = request.headers.get("authorization", "")
        if self.scheme == "Basic":
            return given in {basic(user, password) for user, password in self.users.items()}
        token = given.removeprefix("Bearer ")
        self.tokens[token] = self.tokens.get(token, 0) - 1
        return self.tokens[token] >= 0

    def _give_token(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("authorization", "")
        if given not in {basic(user, password) for user, password in self.users.items()}:
            return web.Response(status=401)
        if self.token_body is not None:
            return web.Response(body=self.token_body)
        asked = request.query
        assert (asked["service"], asked["scope"].partition(":")[0]) == ("it", "repository"), asked
        token = f"token-{len(self.tokens)}-{asked['scope'].replace('/', '.')}"
        self.tokens[token] = self.requests_per_token
        return web.json_response({"token": token, "expires_in": 60})


def basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def docker_config(**entries: Mapping[str, str]) -> str:
    return json.dumps({"auths": entries}, indent=2)


def _type_of(manifest: bytes) -> object:
    try:
        return json.loads(manifest).get("mediaType", MANIFEST)
    except (ValueError, AttributeError):
        return "application/json"


@asynccontextmanager
async def registry_server(folder: Path, host: str = "127.0.0.1") -> AsyncIterator[RegistryServer]:
    async with running(folder / f"registry-{host}", RegistryServer, host) as server:
        assert isinstance(server, RegistryServer)
        yield server
