"""`motet adapter push --to oci://…` sends to CNCF's registry; oras and a runner's fetch process read it from there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet.digest import adapter_digest, hex_of
from motet.errors import SetupError
from motet.resources import read_text
from tests.cli.test_adapter_push import of_another_seed
from tests.cli.upload.conftest import PIRATE, Upload
from tests.runner_service.sources.conftest import FetchSetup
from tests.runner_service.sources.test_s3 import write_secret
from tests.support.real_registry import FILES, PASSWORD, USER, RealRegistry, Start, registries
from tests.support.registry_server import basic
from tools.kube.binaries import find

pytestmark = pytest.mark.needs(lambda: find("registry") and find("oras"), "registry and oras (make kube)")


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """`motet` trusts the registry, and knows its password."""
    (tmp_path / "registry").mkdir()
    async with registries(tmp_path / "registry") as start:

        async def started(auth: str) -> RealRegistry:
            real = await start(auth)
            monkeypatch.setenv("SSL_CERT_FILE", str(real.trusted))
            monkeypatch.setenv("MOTET_REGISTRY_USER", USER)
            monkeypatch.setenv("MOTET_REGISTRY_PASSWORD", PASSWORD)
            return real

        yield started


@pytest.mark.parametrize("auth", ["htpasswd", "token"])
async def test_oras_and_a_runner_read_what_was_pushed(start: Start, upload: Upload, tmp_path: Path, auth: str) -> None:
    real = await start(auth)
    said = await asyncio.to_thread(upload, PIRATE, f"oci://{real.host}/acme/pirate:v1")
    assert said.status == 0
    assert not read_text(said.out).problems
    image = said.source["image"]
    assert image.startswith(f"{real.host}/acme/pirate:v1@sha256:")
    assert said.source["digest"] == adapter_digest(PIRATE)
    assert said.err.endswith("adapter_model.safetensors, adapter_config.json\n")

    for reference in (f"{real.host}/acme/pirate:v1", image):
        pulled = tmp_path / reference.rpartition(":")[2]
        pulled.mkdir()
        await real.oras("pull", reference, cwd=pulled)
        assert sorted(path.name for path in pulled.iterdir()) == sorted(FILES)
        assert adapter_digest(pulled) == adapter_digest(PIRATE)

    runner = FetchSetup(tmp_path / "runner")
    runner.settings |= {"fetch_ca_file": str(real.trusted), "fetch_allowed_hosts": ["127.0.0.1"]}
    how = write_secret(runner, tmp_path, username=USER, password=PASSWORD)
    assert (await runner.fetch(f"oci://{image}", **how)).digest == adapter_digest(PIRATE)

    again = await asyncio.to_thread(upload, PIRATE, f"oci://{real.host}/acme/pirate:v1")
    assert again.out == said.out
    assert again.err.endswith("has all files already\n")


@pytest.mark.usefixtures("unchecked")
async def test_a_tag_is_replaced_if_it_was_named_and_another_one_is_made_if_not(
    start: Start, upload: Upload, tmp_path: Path
) -> None:
    real = await start("htpasswd")
    to = f"oci://{real.host}/acme/pirate"
    newer = of_another_seed(PIRATE, tmp_path / "newer")
    first = await asyncio.to_thread(upload, PIRATE, f"{to}:latest")
    second = await asyncio.to_thread(upload, newer, f"{to}:latest")
    assert first.source["image"] != second.source["image"]
    assert second.err.endswith(f"sent to {second.source['image']}: adapter_config.json\n"), "the weights are there"

    untagged = await asyncio.to_thread(upload, newer, to)
    tag = f"motet-{hex_of(adapter_digest(newer))[:12]}"
    assert untagged.source["image"] == second.source["image"].replace(":latest", f":{tag}")
    await real.push(f"acme/pirate:motet-{hex_of(adapter_digest(PIRATE))[:12]}", newer)  # somebody else's
    with pytest.raises(SetupError, match=r"is there, and names another artifact\. Name a tag of your own in --to"):
        await asyncio.to_thread(upload, PIRATE, to)


@pytest.mark.usefixtures("unchecked")
async def test_the_login_of_docker_is_used(
    start: Start, upload: Upload, monkeypatch: pytest.MonkeyPatch, docker_login
) -> None:
    real = await start("token")
    monkeypatch.delenv("MOTET_REGISTRY_USER")
    monkeypatch.delenv("MOTET_REGISTRY_PASSWORD")
    with pytest.raises(SetupError, match=rf"docker login {real.host}\), or set MOTET_REGISTRY_USER and MOTET_REG"):
        await asyncio.to_thread(upload, PIRATE, f"oci://{real.host}/acme/pirate:v1")
    docker_login({"auths": {real.host: {"auth": basic(USER, PASSWORD).removeprefix("Basic ")}}})
    assert (await asyncio.to_thread(upload, PIRATE, f"oci://{real.host}/acme/pirate:v1")).status == 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("auth", ["htpasswd", "token"])
async def test_what_is_wrong_is_said_in_one_line(
    start: Start, upload: Upload, monkeypatch: pytest.MonkeyPatch, auth: str
) -> None:
    real = await start(auth)
    for name, value, host, words in [
        ("MOTET_REGISTRY_PASSWORD", "falsch", real.host, "Log in|the login is wrong"),
        ("SSL_CERT_FILE", str(Path(__file__)), real.host, r"is not trusted .* SSL_CERT_FILE"),
        ("SSL_CERT_FILE", str(real.trusted), "no-such-host.invalid", r"no host no-such-host\.invalid\. Correct --to"),
    ]:
        monkeypatch.setenv(name, value)
        with pytest.raises(SetupError, match=words) as refused:
            await asyncio.to_thread(upload, PIRATE, f"oci://{host}/acme/pirate:v1")
        assert "\n" not in refused.value.message
        assert PASSWORD not in refused.value.message
        monkeypatch.setenv("MOTET_REGISTRY_PASSWORD", PASSWORD)
