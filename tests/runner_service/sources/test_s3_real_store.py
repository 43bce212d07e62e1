"""Adapters from versitygw, an object store that others have written (`make kube` builds it)."""

import asyncio
import base64
import hashlib
import os
import ssl
import subprocess
import zlib
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import pytest

from motet.digest import adapter_digest
from motet.errors import AdapterFetchFailed
from testbed.cluster.certificates import ClusterAuthority
from testbed.ports import free_port
from tests.common.waiting import PATIENCE_S
from tests.runner_service.sources.conftest import FetchSetup
from tests.runner_service.sources.test_s3 import write_secret
from tests.support.in_process_runner import write_adapter
from tests.support.s3_server import signature
from tools.kube.binaries import find

pytestmark = pytest.mark.needs(lambda: find("versitygw"), "versitygw (make kube)")

KEY, SECRET, REGION = "AKIAREAL", "a secret/+=7", "eu-central-1"


class RealStore:
    def __init__(self, base: str, authority: Path) -> None:
        self.base = base
        self._client = httpx2.Client(verify=ssl.create_default_context(cafile=str(authority)), trust_env=False)

    def put(self, path: str, body: bytes = b"") -> int:
        return self._send(path, body, {"x-amz-content-sha256": hashlib.sha256(body).hexdigest()})

    def put_as_the_cli(self, path: str, body: bytes) -> int:
        """As the CLI of AWS uploads a file from version 2.23 on: in chunks, with a checksum behind them."""
        checksum = base64.b64encode(zlib.crc32(body).to_bytes(4, "big"))
        chunks = b"%x\r\n%b\r\n0\r\nx-amz-checksum-crc32:%b\r\n\r\n" % (len(body), body, checksum)
        words = {
            "content-encoding": "aws-chunked",
            "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
            "x-amz-decoded-content-length": str(len(body)),
            "x-amz-sdk-checksum-algorithm": "CRC32",
            "x-amz-trailer": "x-amz-checksum-crc32",
        }
        return self._send(path, chunks, words)

    def _send(self, path: str, body: bytes, words: Mapping[str, str]) -> int:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        signed = {"host": self.base.removeprefix("https://"), "x-amz-date": stamp, **words}
        credential = f"{KEY}/{stamp[:8]}/{REGION}/s3/aws4_request"
        headers = signed | {
            "authorization": f"AWS4-HMAC-SHA256 Credential={credential},SignedHeaders={';'.join(sorted(signed))},"
            f"Signature={signature('PUT', path, signed, SECRET, REGION)}"
        }
        return self._client.put(self.base + path, content=body, headers=headers).status_code

    def publish(self, bucket: str, prefix: str, folder: Path) -> str:
        for path in folder.iterdir():
            assert self.put(f"/{bucket}/{prefix}/{path.name}", path.read_bytes()) == 200
        return f"s3://{bucket}/{prefix}"


@pytest.fixture
async def real(tmp_path: Path, fetch_setup: FetchSetup) -> AsyncIterator[RealStore]:
    for folder in ("authority", "buckets", "attributes"):
        (tmp_path / folder).mkdir()
    authority = ClusterAuthority(tmp_path / "authority", "authority-of-versitygw")
    pair = authority.serving("versitygw", ["127.0.0.1", "localhost"])
    at = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        str(find("versitygw")),
        *("--port", at, "--access", KEY, "--secret", SECRET, "--region", REGION),
        *("--cert", str(pair.certificate), "--key", str(pair.key), "--quiet"),
        *("posix", "--sidecar", str(tmp_path / "attributes"), str(tmp_path / "buckets")),
        env={"PATH": os.environ["PATH"]},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    store = RealStore(f"https://{at}", authority.pair.certificate)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                assert process.returncode is None
                try:
                    if store.put("/models") == 200:
                        break
                except httpx2.TransportError:
                    pass
                await asyncio.sleep(0.05)
        fetch_setup.settings |= {
            "fetch_ca_file": str(authority.pair.certificate),
            "s3_endpoint": store.base,
            "s3_region": REGION,
        }
        yield store
    finally:
        process.kill()
        await process.wait()


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
