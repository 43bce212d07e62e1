"""Adapters from CNCF's registry, pushed with oras: both are made by others (`make kube` builds them)."""

import asyncio
import base64
import hashlib
import json
import os
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
import pytest
import yaml
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from motet.digest import adapter_digest
from motet.errors import AdapterFetchFailed
from testbed.cluster.certificates import ClusterAuthority, Pair
from testbed.ports import free_port
from tests.common.waiting import PATIENCE_S
from tests.runner_service.sources.conftest import FetchSetup
from tests.runner_service.sources.test_s3 import write_secret
from tests.support.registry_server import basic, docker_config
from tests.support.source_servers import WebServer, running
from tools.kube.binaries import find

pytestmark = pytest.mark.needs(lambda: find("registry") and find("oras"), "registry and oras (make kube)")

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
        self._trusted = trusted
        self._home = home

    async def oras(self, *words: str, cwd: Path) -> None:
        process = await asyncio.create_subprocess_exec(
            *(str(find("oras")), *words),
            *("--ca-file", str(self._trusted), "--username", USER, "--password", PASSWORD),
            cwd=cwd,
            env={"PATH": os.environ["PATH"], "HOME": str(self._home), "SSL_CERT_FILE": str(self._trusted)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()

    async def push(self, reference: str, folder: Path, *files: str) -> str:
        await self.oras("push", f"{self.host}/{reference}", *(files or FILES), cwd=folder)
        return f"oci://{self.host}/{reference}"


Start = Callable[[str], Awaitable[RealRegistry]]


@pytest.fixture
async def start(tmp_path: Path, fetch_setup: FetchSetup) -> AsyncIterator[Start]:
    """Starts a registry that asks for a password itself, or for a realm's token."""
    async with AsyncExitStack() as stack:
        (tmp_path / "authority").mkdir()
        authority = ClusterAuthority(tmp_path / "authority", "authority-of-registry")
        pair = authority.serving("registry", ["127.0.0.1"])

        async def started(auth: str) -> RealRegistry:
            trusted = tmp_path / "trusted.pem"
            trusted.write_bytes(authority.pair.certificate.read_bytes())
            (tmp_path / "users").write_text(f"{USER}:{HASHED}\n")
            how: dict[str, str] = {"realm": "it", "path": str(tmp_path / "users")}
            if auth == "token":
                realm = await stack.enter_async_context(running(tmp_path / "realm", Realm))
                assert isinstance(realm, Realm)
                realm.pair = pair
                trusted.write_bytes(trusted.read_bytes() + realm.ca_file.read_bytes())
                how = {"realm": realm.url("/token"), "service": "registry", "issuer": "it"}
                how["rootcertbundle"] = str(authority.pair.certificate)
            host = f"127.0.0.1:{free_port()}"
            (tmp_path / "registry.yaml").write_text(
                yaml.safe_dump(
                    {
                        "version": "0.1",
                        "log": {"level": "error", "accesslog": {"disabled": True}},
                        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "blobs")}},
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
                *(str(find("registry")), "serve", str(tmp_path / "registry.yaml")),
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
            fetch_setup.settings |= {"fetch_ca_file": str(trusted), "fetch_allowed_hosts": ["127.0.0.1"]}
            return RealRegistry(host, trusted, tmp_path)

        yield started


@pytest.mark.parametrize("auth", ["htpasswd", "token"])
async def test_an_adapter_comes_from_a_real_registry(
    start: Start, fetch_setup: FetchSetup, adapter: Path, tmp_path: Path, auth: str
) -> None:
    real = await start(auth)
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    source = await real.push("acme/pirate:v1", adapter, *FILES, "chat_template.jinja")
    entry = {"auth": basic(USER, PASSWORD).removeprefix("Basic ")}
    how = write_secret(fetch_setup, tmp_path, **{".dockerconfigjson": docker_config(**{real.host: entry})})
    assert (await fetch_setup.fetch(source, **how)).digest == adapter_digest(adapter)

    for uri, words in [
        (source.replace("v1", "v2"), r"404 for oci://\S+:v2"),
        (source.replace("pirate", "none"), r"404 for oci://\S+none:v1"),
        (f"{source}@sha256:{'0' * 64}", r"404 for oci://\S+:v1@sha"),
    ]:
        with pytest.raises(AdapterFetchFailed, match=words):
            await fetch_setup.fetch(uri, manifest=uri, **how)
    with pytest.raises(AdapterFetchFailed, match=r"Secret.* source\.credentialsSecretRef") as failed:
        await fetch_setup.fetch(source, manifest="none")
    assert failed.value.reason == "CredentialsInvalid"
    how = write_secret(fetch_setup, tmp_path, username=USER, password="wrong")
    with pytest.raises(AdapterFetchFailed, match=r"Secret in source\.credentialsSecretRef") as failed:
        await fetch_setup.fetch(source, manifest="wrong", **how)
    assert failed.value.reason == "CredentialsInvalid"


async def test_a_fetch_that_broke_is_continued_and_what_oras_makes_is_understood(
    start: Start, fetch_setup: FetchSetup, adapter: Path, tmp_path: Path
) -> None:
    real = await start("htpasswd")
    how = write_secret(fetch_setup, tmp_path, username=USER, password=PASSWORD)
    source = await real.push("acme/pirate:v1", adapter)
    weights = (adapter / FILES[1]).read_bytes()
    sources = fetch_setup.sources
    left = sources.partial.folder_of("tenant-a", source, "", "tenant-a/key")
    left.mkdir(parents=True)
    (left / f"{FILES[1]}.part").write_bytes(bytes(len(weights) // 2))
    (left / f"{FILES[1]}.etag").write_text(f"sha256:{hashlib.sha256(weights).hexdigest()}")
    with pytest.raises(AdapterFetchFailed, match="comes with another size or digest than its manifest says"):
        await fetch_setup.fetch(source, **how)  # what lay there was taken, and only the rest was fetched
    assert (await fetch_setup.fetch(source, **how)).digest == adapter_digest(adapter)

    await real.oras("manifest", "index", "create", f"{real.host}/acme/pirate:all", "v1", cwd=tmp_path)
    found = await fetch_setup.fetch(source.replace(":v1", ":all"), manifest="all", **how)
    assert found.digest == adapter_digest(adapter)

    folder = await real.push("acme/pirate:folder", tmp_path, adapter.name)
    with pytest.raises(AdapterFetchFailed, match=r"has its files in folders\. Push them from inside their folder"):
        await fetch_setup.fetch(folder, manifest="folder", **how)
