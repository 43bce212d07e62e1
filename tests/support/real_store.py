"""versitygw, an object store that others have written (`make kube` builds it), and a few requests to it.

async with real_store(tmp_path) as real:
    real.put("/bucket/key", b"…")
"""

import asyncio
import base64
import hashlib
import os
import ssl
import subprocess
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx2

from testbed.cluster.certificates import ClusterAuthority
from testbed.ports import free_port
from tests.common.waiting import PATIENCE_S
from tests.support.s3_server import signature
from tools.kube.binaries import find

KEY, SECRET, REGION = "AKIAREAL", "a secret/+=7", "eu-central-1"


class RealStore:
    def __init__(self, base: str, authority: Path) -> None:
        self.base = base
        self.ca_file = authority
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


@asynccontextmanager
async def real_store(folder: Path) -> AsyncIterator[RealStore]:
    """With one bucket, `models`."""
    for name in ("authority", "buckets", "attributes"):
        (folder / name).mkdir()
    authority = ClusterAuthority(folder / "authority", "authority-of-versitygw")
    pair = authority.serving("versitygw", ["127.0.0.1", "localhost"])
    at = f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        str(find("versitygw")),
        *("--port", at, "--access", KEY, "--secret", SECRET, "--region", REGION),
        *("--cert", str(pair.certificate), "--key", str(pair.key), "--quiet"),
        *("posix", "--sidecar", str(folder / "attributes"), str(folder / "buckets")),
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
        yield store
    finally:
        process.kill()
        await process.wait()
