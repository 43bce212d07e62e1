"""Adapters from CNCF's registry, pushed with oras: both are made by others (`make kube` builds them)."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet.digest import adapter_digest
from motet.errors import AdapterFetchFailed
from tests.runner_service.sources.conftest import FetchSetup
from tests.runner_service.sources.test_s3 import write_secret
from tests.support.real_registry import FILES, PASSWORD, USER, RealRegistry, Start, registries
from tests.support.registry_server import basic, docker_config
from tools.kube.binaries import find

pytestmark = pytest.mark.needs(lambda: find("registry") and find("oras"), "registry and oras (make kube)")


@pytest.fixture
async def start(tmp_path: Path, fetch_setup: FetchSetup) -> AsyncIterator[Start]:
    async with registries(tmp_path) as start:

        async def started(auth: str) -> RealRegistry:
            real = await start(auth)
            fetch_setup.settings |= {"fetch_ca_file": str(real.trusted), "fetch_allowed_hosts": ["127.0.0.1"]}
            return real

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
