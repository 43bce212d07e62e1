"""What breaks while an adapter is sent: attempts are bounded, nothing looks whole before it is, errors are one line."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web

from motet.digest import adapter_digest, hex_of
from motet.errors import SetupError
from motet_cli.upload import blobs, exchange
from motet_cli.upload.exchange import MAX_ATTEMPTS, Exchange, Peer
from tests.cli.upload.conftest import PIRATE, Said, Upload
from tests.support.registry_server import basic
from tests.support.s3_server import failed
from tests.support.upload_server import BREAK, ENDLESS, Scripted, UploadServer, upload_server

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PLACE = f"/models/pirate/{hex_of(adapter_digest(PIRATE))[:16]}"
USUAL = web.Response(status=100)
SECRET = "canary-5e2b41"


@pytest.fixture
async def checking_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[UploadServer]:
    async with upload_server(tmp_path) as server:
        given = {
            "AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL_S3": server.base,
            "AWS_CA_BUNDLE": str(server.ca_file), "SSL_CERT_FILE": str(server.ca_file),
            "MOTET_REGISTRY_USER": "me", "MOTET_REGISTRY_PASSWORD": SECRET,
        }  # fmt: skip
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def server(checking_server: UploadServer, unchecked: None) -> UploadServer:
    return checking_server


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PIRATE, tmp_path / "trained"))


def change(folder: Path, **fields: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


async def sent(upload: Upload, server: UploadServer, kind: str, folder: Path = PIRATE) -> Said:
    to = "s3://models/pirate" if kind == "s3" else f"oci://{server.base.removeprefix('https://')}/acme/pirate:v1"
    return await asyncio.to_thread(upload, folder, to)


async def refused(upload: Upload, server: UploadServer, kind: str, words: str) -> None:
    with pytest.raises(SetupError, match=words) as error:
        await sent(upload, server, kind)
    assert "\n" not in error.value.message
    assert SECRET not in error.value.message


# ------------------------------------------------------------------------------------------------------------ attempts


@pytest.mark.parametrize(("kind", "what"), [("s3", f"PUT {WEIGHTS}"), ("oci", "POST "), ("oci", "PUT 1")])
async def test_what_passes_is_tried_again(upload: Upload, server: UploadServer, kind: str, what: str) -> None:
    server.scripted[what] = [BREAK, web.Response(status=503, headers={"retry-after": "0"}), BREAK, USUAL]
    assert (await sent(upload, server, kind)).status == 0


@pytest.mark.parametrize(
    ("kind", "what"), [("s3", f"GET {CONFIG}"), ("s3", f"PUT {WEIGHTS}"), ("oci", "PUT 1"), ("oci", "GET v1")]
)
@pytest.mark.parametrize("fault", [BREAK, web.Response(status=503)], ids=["break", "503"])
async def test_attempts_are_bounded(
    upload: Upload, server: UploadServer, kind: str, what: str, fault: Scripted
) -> None:
    server.scripted[what] = [fault]
    await refused(upload, server, kind, "could not be sent in 5 attempts: .*what has arrived is not sent again")
    assert server.came(*what.split()) == MAX_ATTEMPTS


async def test_a_store_may_not_ask_for_an_endless_pause(
    upload: Upload, server: UploadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(exchange.time, "sleep", pauses.append)
    server.scripted[f"PUT {WEIGHTS}"] = [web.Response(status=503, headers={"retry-after": "999999999"}), USUAL]
    assert (await sent(upload, server, "s3")).status == 0
    assert pauses
    assert max(pauses) <= exchange.MAX_PAUSE_SECONDS


async def test_what_is_no_http_is_not_tried_again_and_not_shown(server: UploadServer) -> None:
    def ask() -> None:
        with Exchange(Peer(name="s3://models", address_from="--to")) as exchange:
            headers = {"authorization": f"{SECRET}\nx"}
            exchange.patiently(CONFIG, partial(exchange.send, "GET", server.base, headers))

    with pytest.raises(SetupError, match=r"^s3://models: a request to 127\.0\.0\.1 would be no valid HTTP") as error:
        await asyncio.to_thread(ask)
    assert SECRET not in error.value.message


async def test_an_endless_answer_is_left(upload: Upload, server: UploadServer) -> None:
    server.scripted[f"PUT {WEIGHTS}"] = [ENDLESS]
    await refused(upload, server, "s3", f"the store answers 400 for {WEIGHTS}")
    assert server.sent < 100 * exchange.MAX_ANSWER_BYTES


# ------------------------------------------------------------------------------------------------------- in the middle


async def test_a_push_that_ends_in_the_middle_leaves_no_whole_adapter_and_the_next_one_goes_on(
    upload: Upload, server: UploadServer
) -> None:
    server.scripted[f"PUT {CONFIG}"] = [failed(403, "AccessDenied")]
    await refused(upload, server, "s3", f"403 AccessDenied for {CONFIG}: AWS_ACCESS_KEY_ID needs the permission s3:Put")
    assert list(server.files) == [f"{PLACE}/{WEIGHTS}"]
    server.scripted.clear()
    assert (await sent(upload, server, "s3")).err.endswith(f": {CONFIG}\n")
    assert server.came("PUT", WEIGHTS) == 1


async def test_the_manifest_of_an_artifact_comes_last(upload: Upload, server: UploadServer) -> None:
    server.scripted["PUT 1"] = [USUAL, USUAL, BREAK]  # the empty configuration, the weights, the adapter's own
    await refused(upload, server, "oci", f"{CONFIG} could not be sent")
    assert not any("/manifests/" in path for path in server.files)
    assert len(server.files) == 2
    server.scripted.clear()
    assert (await sent(upload, server, "oci")).err.endswith(f": {CONFIG}\n")
    assert [one.path for one in server.asked if one.method == "PUT"][-1] == "/v2/acme/pirate/manifests/v1"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_blob_that_lies_in_another_store_is_not_sent_again(
    upload: Upload, server: UploadServer, status: int
) -> None:
    weights = blobs.blob_of(WEIGHTS, (PIRATE / WEIGHTS).read_bytes()).digest
    server.scripted[f"HEAD {weights}"] = [web.Response(status=status, headers={"location": "https://127.0.0.2/x"})]
    assert (await sent(upload, server, "oci")).err.endswith(f": {CONFIG}\n")
    assert not any(path.endswith(weights) for path in server.files)


@pytest.mark.parametrize("kind", ["s3", "oci"])
@pytest.mark.parametrize("more", [b"", b"more"])
async def test_a_file_that_changes_is_not_sent_as_another(
    upload: Upload, server: UploadServer, trained: Path, kind: str, more: bytes
) -> None:
    read = blobs.blobs_of

    def then_changed(*words):
        found = read(*words)
        weights = (trained / WEIGHTS).read_bytes()
        (trained / WEIGHTS).write_bytes(weights + more if more else weights[:-1])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("motet_cli.adapter_upload.blobs_of", then_changed)
        with pytest.raises(SetupError, match=r"trained changes while it is pushed\. Push it again once it is saved"):
            await sent(upload, server, kind, trained)
    assert not any(path.endswith((CONFIG, "v1")) for path in server.files)


async def test_files_that_change_after_the_check_are_not_sent(
    upload: Upload, server: UploadServer, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = blobs.blobs_of

    def changed_before(*words):
        change(trained, lora_alpha=17)
        return read(*words)

    monkeypatch.setattr("motet_cli.adapter_upload.blobs_of", changed_before)
    with pytest.raises(SetupError, match="changes while it is pushed"):
        await sent(upload, server, "s3", trained)
    assert server.asked == []


async def test_what_the_check_refuses_is_not_sent(upload: Upload, checking_server: UploadServer, trained: Path) -> None:
    change(trained, use_dora=True)
    said = await sent(upload, checking_server, "s3", trained)
    assert (said.status, said.out, checking_server.asked) == (1, "", [])
    assert "refused (UnmappedTensors)" in said.err


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (failed(507, "XMinioStorageFull"), r"507 XMinioStorageFull .*: it is full\. Make room there"),
        (failed(403, "QuotaExceeded"), "it is full"),
        (failed(404, "NoSuchBucket"), "there is no bucket models. Create it, or correct --to, or AWS_ENDPOINT_URL"),
        (failed(400, "ExpiredToken"), "AWS_SESSION_TOKEN has expired"),
        (failed(403, "RequestTimeTooSkewed"), "Set the clock"),
        (failed(400, "XAmzContentSHA256Mismatch"), "changes while it is pushed"),
        (failed(301, "PermanentRedirect"), "in another region than us-east-1. Set AWS_REGION"),
        (failed(301, "PermanentRedirect", "<Region>eu-west-1</Region>"), "from one region to another"),
        (failed(400, "NotOurs"), f"the store answers 400 NotOurs for {WEIGHTS}"),
    ],
)
async def test_refusals_of_stores(upload: Upload, server: UploadServer, answer: web.Response, words: str) -> None:
    server.scripted[f"PUT {WEIGHTS}"] = [answer]
    await refused(upload, server, "s3", words)


def oci_error(status: int, code: str, message: str) -> web.Response:
    return web.Response(status=status, text=json.dumps({"errors": [{"code": code, "message": message}]}))


@pytest.mark.parametrize(
    ("what", "answer", "words"),
    [
        ("POST ", oci_error(403, "DENIED", "would exceed the QUOTA"), "would exceed the QUOTA.: it is full. Make room"),
        ("POST ", oci_error(403, "DENIED", "no"), r"403 DENIED for .*may not push to acme/pirate. Log in"),
        (
            "POST ",
            oci_error(404, "NAME_UNKNOWN", "?"),
            "there is no repository acme/pirate. Create it, or correct --to",
        ),
        ("PUT 1", oci_error(413, "", ""), "larger than the registry"),
        ("PUT 1", web.Response(status=507), "it is full"),
        ("PUT 1", oci_error(400, "DIGEST_INVALID", "x"), "changes while it is pushed"),
        ("PUT v1", oci_error(400, "MANIFEST_INVALID", "\x1b[2J\nbad"), r"400 MANIFEST_INVALID for the manifest"),
        ("PUT v1", web.Response(status=201, headers={"docker-content-digest": "sha256:0"}), "stored another manifest"),
        ("POST ", web.Response(status=202, headers={"location": "http://127.0.0.1/x"}), "names no https:// URL"),
        ("POST ", web.Response(status=202), "names no https:// URL"),
        ("POST ", web.Response(status=202, headers={"location": "https://127.0.0.1:99999/x"}), "names no https:// URL"),
        ("POST ", web.Response(status=202, headers={"location": "https://[/x"}), "names no https:// URL"),
    ],
)
async def test_refusals_of_registries(
    upload: Upload, server: UploadServer, what: str, answer: web.Response, words: str
) -> None:
    server.scripted[what] = [answer]
    await refused(upload, server, "oci", words)


async def test_the_login_goes_to_the_registry_and_not_to_where_it_takes_blobs(
    upload: Upload, server: UploadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with upload_server(tmp_path, "127.0.0.2") as other:
        both = tmp_path / "both.pem"
        both.write_bytes(server.ca_file.read_bytes() + other.ca_file.read_bytes())
        monkeypatch.setenv("SSL_CERT_FILE", str(both))
        server.scripted["GET v1"] = [web.Response(status=401, headers={"www-authenticate": 'Basic realm="x"'}), USUAL]
        server.uploads_at = other.base
        assert (await sent(upload, server, "oci")).status == 0
    assert {one.headers.get("authorization") for one in server.asked[1:]} == {basic("me", SECRET)}
    assert other.asked
    assert not any("authorization" in one.headers for one in other.asked)


async def test_a_login_that_ends_in_the_middle_is_renewed(upload: Upload, server: UploadServer) -> None:
    asks = web.Response(status=401, headers={"www-authenticate": 'Basic realm="x"'})
    server.scripted["PUT 1"] = [asks, USUAL, asks, USUAL]
    assert (await sent(upload, server, "oci")).status == 0
