"""`motet adapter push --to s3://…` sends to versitygw, and a runner's fetch process reads it from there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from motet.digest import adapter_digest, hex_of
from motet.errors import SetupError
from motet.resources import read_text
from tests.cli.test_adapter_push import of_another_seed
from tests.cli.upload.conftest import PIRATE, Upload
from tests.runner_service.sources.conftest import FetchSetup
from tests.runner_service.sources.test_s3 import write_secret
from tests.support.real_store import KEY, REGION, SECRET, RealStore, real_store
from tools.kube.binaries import find

pytestmark = pytest.mark.needs(lambda: find("versitygw"), "versitygw (make kube)")

PLACE = hex_of(adapter_digest(PIRATE))[:16]
KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


@pytest.fixture
async def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RealStore]:
    """`motet` is asked to use it."""
    (tmp_path / "store").mkdir()
    async with real_store(tmp_path / "store") as store:
        given = KEYS | {"AWS_ENDPOINT_URL": store.base, "AWS_CA_BUNDLE": str(store.ca_file)}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        yield store


async def test_a_runner_serves_what_was_pushed_and_a_second_push_sends_nothing(
    real: RealStore, upload: Upload, tmp_path: Path
) -> None:
    said = await asyncio.to_thread(upload, PIRATE, "s3://models/acme/pirate/", secret="bucket")
    assert said.status == 0
    assert yaml.safe_load(said.out) == {
        "apiVersion": "motet.dev/v1alpha1",
        "kind": "LoRAAdapter",
        "metadata": {"name": "desk", "namespace": "acme"},
        "spec": {
            "poolRef": {"name": "demo", "namespace": "motet-pools"},
            "source": {
                "uri": f"s3://models/acme/pirate/{PLACE}",
                "digest": adapter_digest(PIRATE),
                "credentialsSecretRef": {"name": "bucket"},
            },
        },
    }
    assert not read_text(said.out).problems
    assert "served on " in said.err
    assert said.err.endswith("adapter_model.safetensors, adapter_config.json\n")
    runner = FetchSetup(tmp_path / "runner")
    runner.settings |= {"fetch_ca_file": str(real.ca_file), "s3_endpoint": real.base, "s3_region": REGION}
    fetched = await runner.fetch(said.source["uri"], **write_secret(runner, tmp_path, **KEYS))
    assert fetched.digest == adapter_digest(PIRATE)

    again = await asyncio.to_thread(upload, PIRATE, "s3://models/acme/pirate", secret="bucket")
    assert again.out == said.out
    assert again.err.endswith(f"s3://models/acme/pirate/{PLACE} has all files already\n")


@pytest.mark.usefixtures("unchecked")
async def test_another_revision_leaves_the_first_one_as_it_is(real: RealStore, upload: Upload, tmp_path: Path) -> None:
    first = await asyncio.to_thread(upload, PIRATE, "s3://models/pirate")
    newer = of_another_seed(PIRATE, tmp_path / "newer")
    second = await asyncio.to_thread(upload, newer, "s3://models/pirate")
    assert first.source["uri"] != second.source["uri"]
    assert (await asyncio.to_thread(upload, PIRATE, "s3://models/pirate")).err.endswith("has all files already\n")


@pytest.mark.usefixtures("unchecked")
async def test_an_object_of_the_same_name_and_size_is_replaced(real: RealStore, upload: Upload) -> None:
    weights = (PIRATE / "adapter_model.safetensors").read_bytes()
    assert real.put(f"/models/pirate/{PLACE}/adapter_model.safetensors", bytes(len(weights))) == 200
    said = await asyncio.to_thread(upload, PIRATE, "s3://models/pirate")
    assert said.err.endswith("adapter_model.safetensors, adapter_config.json\n")


REFUSALS = (
    ({"AWS_SECRET_ACCESS_KEY": "geheim"}, "models", "AWS_SECRET_ACCESS_KEY does not belong to AWS_ACCESS_KEY_ID"),
    ({"AWS_ACCESS_KEY_ID": "AKIAOTHER"}, "models", r": it does not know AWS_ACCESS_KEY_ID\. Correct it"),
    ({}, "nothing", r"there is no bucket nothing\. Create it, or correct --to"),
    ({"AWS_CA_BUNDLE": ""}, "models", "is not trusted .* AWS_CA_BUNDLE"),
    (
        {"AWS_ENDPOINT_URL": "https://no-such-host.invalid"},
        "models",
        r"no host no-such-host\.invalid\. Correct AWS_END",
    ),
    ({"AWS_ENDPOINT_URL": "https://127.0.0.1:1"}, "models", "could not be sent in 5 attempts: connection refused"),
)


@pytest.mark.usefixtures("unchecked")
async def test_what_is_wrong_is_said_in_one_line(real: RealStore, upload: Upload) -> None:
    assert real.base
    for changed, to, words in REFUSALS:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in changed.items():
                patch.setenv(name, value)
            with pytest.raises(SetupError, match=words) as refused:
                await asyncio.to_thread(upload, PIRATE, f"s3://{to}/pirate")
        assert "\n" not in refused.value.message
        assert SECRET not in refused.value.message


@pytest.mark.usefixtures("unchecked")
async def test_the_store_says_in_which_region_it_is(
    real: RealStore, upload: Upload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert REGION != "us-west-2"
    assert (await asyncio.to_thread(upload, PIRATE, "s3://models/pirate")).status == 0
