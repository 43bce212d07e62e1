"""CNCF's registry and oras, which others have made (`make kube` builds them).

async with registries(tmp_path) as start:
    real = await start("htpasswd")
"""

import asyncio
import base64
import json
import os
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import yaml
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from testbed.cluster.certificates import ClusterAuthority, Pair
from testbed.ports import free_port
from tests.common.waiting import PATIENCE_S
from tests.support.registry_server import basic
from tests.support.source_servers import WebServer, running
from tools.kube.binaries import find

USER, PASSWORD = "robot", "canary:/+geheim 5e2b41"
HASHED = "$2b$04$motetmotetmotetmotetm.A3vGehQJciqjzLuYYGSrbdm1Iy5/Le6"  # bcrypt, the only one that it takes
FILES = ("adapter_config.json", "adapter_model.safetensors")


class Realm(WebServer):
    """Gives tokens for what is asked, as the registry's documentation describes them."""

    pair: Pair

    async def serve(self, request: web.Request, path: str, headers: dict[str, str] | None = None) -> web.StreamResponse:
        if request.headers.get("authorization") != basic(USER, PASSWORD):
            return web.Response(status=401)
        access = []
        for scope in request.query.getall("scope"):
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        now = int(time.time())
        claims = {"iss": "it", "aud": request.query["service"], "sub": USER, "nbf": now - 9, "exp": now + 60}
        return web.json_response({"token": self._signed(claims | {"iat": now, "jti": "1", "access": access})})

    def _signed(self, claims: dict[str, object]) -> str:
        certificate = x509.load_pem_x509_certificate(self.pair.certificate.read_bytes())
        key = serialization.load_pem_private_key(self.pair.key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        x5c = [base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()]
        text = ".".join(_encoded(json.dumps(one).encode()) for one in ({"alg": "ES256", "x5c": x5c}, claims))
        numbers = decode_dss_signature(key.sign(text.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{text}.{_encoded(b''.join(one.to_bytes(32, 'big') for one in numbers))}"


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class RealRegistry:
    def __init__(self, host: str, trusted: Path, home: Path) -> None:
        self.host = host
        self.trusted = trusted
        self._home = home

    async def oras(self, *words: str, cwd: Path) -> None:
        process = await asyncio.create_subprocess_exec(
            *(str(find("oras")), *words),
            *("--ca-file", str(self.trusted), "--username", USER, "--password", PASSWORD),
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "HOME": str(self._home), "SSL_CERT_FILE": str(self.trusted)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()

    async def push(self, reference: str, folder: Path, *files: str) -> str:
        await self.oras("push", f"{self.host}/{reference}", *(files or FILES), cwd=folder)
        return f"oci://{self.host}/{reference}"


Start = Callable[[str], Awaitable[RealRegistry]]


@asynccontextmanager
async def registries(folder: Path) -> AsyncIterator[Start]:
    """Starts a registry that asks for a password itself (`htpasswd`), or for a realm's token (`token`)."""
    async with AsyncExitStack() as stack:
        (folder / "authority").mkdir()
        authority = ClusterAuthority(folder / "authority", "authority-of-registry")
        pair = authority.serving("registry", ["127.0.0.1"])

        async def started(auth: str) -> RealRegistry:
            trusted = folder / "trusted.pem"
            trusted.write_bytes(authority.pair.certificate.read_bytes())
            (folder / "users").write_text(f"{USER}:{HASHED}\n")
            how: dict[str, str] = {"realm": "it", "path": str(folder / "users")}
            if auth == "token":
                realm = await stack.enter_async_context(running(folder / "realm", Realm))
                assert isinstance(realm, Realm)
                realm.pair = pair
                trusted.write_bytes(trusted.read_bytes() + realm.ca_file.read_bytes())
                how = {"realm": realm.url("/token"), "service": "registry", "issuer": "it"}
                how["rootcertbundle"] = str(authority.pair.certificate)
            host = f"127.0.0.1:{free_port()}"
            (folder / "registry.yaml").write_text(
                yaml.safe_dump(
                    {
                        "version": "0.1",
                        "log": {"level": "error", "accesslog": {"disabled": True}},
                        "storage": {"filesystem": {"rootdirectory": str(folder / "blobs")}},
                        "http": {
                            "addr": host,
                            "secret": "x",
                            "tls": {"certificate": str(pair.certificate), "key": str(pair.key)},
                        },
                        "auth": {auth: how},
                    }
                )
            )
            process = await asyncio.create_subprocess_exec(
                *(str(find("registry")), "serve", str(folder / "registry.yaml")),
                env={"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.push_async_callback(process.wait)
            stack.callback(process.kill)
            trust = ssl.create_default_context(cafile=str(trusted))
            async with httpx2.AsyncClient(verify=trust, trust_env=False) as client, asyncio.timeout(PATIENCE_S):
                while True:
                    assert process.returncode is None
                    try:
                        assert (await client.get(f"https://{host}/v2/")).status_code == 401
                        break
                    except httpx2.TransportError:
                        await asyncio.sleep(0.05)
            return RealRegistry(host, trusted, folder)

        yield started
