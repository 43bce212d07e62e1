"""Adapters from versitygw, an object store that others have written (`make kube` builds it)."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet.digest import adapter_digest
from motet.errors import AdapterFetchFailed
from tests.runner_service.sources.conftest import FetchSetup
from tests.runner_service.sources.test_s3 import write_secret
from tests.support.in_process_runner import write_adapter
from tests.support.real_store import KEY, REGION, SECRET, RealStore, real_store
from tools.kube.binaries import find

pytestmark = pytest.mark.needs(lambda: find("versitygw"), "versitygw (make kube)")


@pytest.fixture
async def real(tmp_path: Path, fetch_setup: FetchSetup) -> AsyncIterator[RealStore]:
    async with real_store(tmp_path) as store:
        fetch_setup.settings |= {"fetch_ca_file": str(store.ca_file), "s3_endpoint": store.base, "s3_region": REGION}
        yield store


async def test_an_adapter_comes_from_a_real_store(
    real: RealStore, fetch_setup: FetchSetup, adapter: Path, tmp_path: Path
) -> None:
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    source = real.publish("models", "acme/pirate~v1", adapter)
    real.publish("models", "acme/pirate~v1/checkpoint-500", write_adapter(tmp_path / "other", seed=9))
    how = write_secret(fetch_setup, tmp_path, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    fetched = await fetch_setup.fetch(source, **how)
    assert fetched.digest == adapter_digest(adapter) == adapter_digest(fetched.folder)


async def test_files_that_were_uploaded_by_the_cli_of_aws(
    real: RealStore, fetch_setup: FetchSetup, adapter: Path, tmp_path: Path
) -> None:
    for path in adapter.iterdir():
        assert real.put_as_the_cli(f"/models/pirate/{path.name}", path.read_bytes()) == 200
    how = write_secret(fetch_setup, tmp_path, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    assert (await fetch_setup.fetch("s3://models/pirate", **how)).digest == adapter_digest(adapter)


async def test_a_fetch_that_broke_is_continued_and_a_changed_object_is_not(
    real: RealStore, fetch_setup: FetchSetup, adapter: Path, tmp_path: Path
) -> None:
    """Half of the weights lie there, as an earlier fetch leaves them."""
    source = real.publish("models", "pirate", adapter)
    how = write_secret(fetch_setup, tmp_path, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    md5 = hashlib.md5(weights, usedforsecurity=False).hexdigest()
    sources, key = fetch_setup.sources, "tenant-a/key"
    left = sources.partial.folder_of("tenant-a", source, "", key, *sources.store_of(source, key))
    left.mkdir(parents=True)
    half = bytes(len(weights) // 2)
    (left / "adapter_model.safetensors.part").write_bytes(half)
    (left / "adapter_model.safetensors.etag").write_text(f'"{md5}"')
    damaged = half + weights[len(half) :]
    with pytest.raises(AdapterFetchFailed, match="has the digest"):
        await fetch_setup.fetch(source, expected=adapter_digest(adapter), **how)
    assert damaged != weights, "what lay there was taken, and only the rest was fetched"

    left.mkdir(parents=True)
    (left / "adapter_model.safetensors.part").write_bytes(half)
    (left / "adapter_model.safetensors.etag").write_text(f'"{"0" * 32}"')
    digest = adapter_digest(adapter)
    assert (await fetch_setup.fetch(source, expected=digest, manifest="b", **how)).digest == digest


async def test_refusals_of_a_real_store_are_understood(
    real: RealStore, fetch_setup: FetchSetup, adapter: Path, tmp_path: Path
) -> None:
    source = real.publish("models", "pirate", adapter)
    for given, uri, words in [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, source, "SignatureDoesNotMatch: AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ACCESS_KEY_ID": "AKIAOTHER"}, source, "answers 40[34] (InvalidAccessKeyId|XAdminUserNotFound)"),
        ({}, "s3://nothing/a", "NoSuchBucket: there is no such bucket"),
        ({}, "s3://models/nothing", r"s3://models/nothing has no adapter_config\.json"),
    ]:
        keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET} | given
        with pytest.raises(AdapterFetchFailed, match=words):
            await fetch_setup.fetch(uri, manifest=words, **write_secret(fetch_setup, tmp_path, **keys))
    with pytest.raises(AdapterFetchFailed, match=r"AccessDenied.*it is not public"):
        await fetch_setup.fetch(source)


async def test_a_real_store_in_another_region_than_the_setting_says(
    real: RealStore, fetch_setup: FetchSetup, adapter: Path, tmp_path: Path
) -> None:
    fetch_setup.settings["s3_region"] = "us-east-1"
    source = real.publish("models", "pirate", adapter)
    how = write_secret(fetch_setup, tmp_path, AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
    assert (await fetch_setup.fetch(source, **how)).digest == adapter_digest(adapter)
