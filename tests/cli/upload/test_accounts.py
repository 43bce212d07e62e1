"""Where credentials come from, and what `--to` may be. No server is asked."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from motet.domain import Digest
from motet.errors import SetupError
from motet_cli.settings import Settings
from motet_cli.upload import bucket, registry_account
from motet_cli.upload.artifact import EMPTY, manifest_of
from motet_cli.upload.blobs import blob_of
from motet_cli.upload.destinations import destination_of
from motet_runner.sources import s3
from motet_runner.sources.oci_manifest import Layer, read
from motet_runner.sources.s3_signature import AccessKey
from tests.cli.upload.conftest import PIRATE, Upload

IMAGE = "ghcr.io/acme/pirate:v1"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIA1", "AWS_SECRET_ACCESS_KEY": "geheim"}
LOGIN = {"auth": base64.b64encode(b"me:geheim").decode()}


def docker(**config: Any) -> tuple[str, str] | None:
    return registry_account.login_in(json.dumps(config).encode(), IMAGE, Path("config.json"))


def test_a_login_of_docker_is_found() -> None:
    assert docker(auths={"ghcr.io": LOGIN}) == ("me", "geheim")
    assert docker(auths={"ghcr.io": LOGIN}, credsStore="desktop") == ("me", "geheim")


@pytest.mark.parametrize(
    "config", [{}, {"auths": {}}, {"auths": {"quay.io": LOGIN}}, {"credHelpers": {"quay.io": "x"}}]
)
def test_without_a_login_the_registry_is_asked_without(config: dict[str, Any]) -> None:
    assert docker(**config) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"credsStore": "desktop"}, r"config\.json leaves ghcr\.io to credsStore, and Motet asks no credential helper"),
        ({"auths": {"ghcr.io": {}}, "credsStore": "desktop"}, "to credsStore"),
        ({"auths": {"quay.io": LOGIN}, "credHelpers": {"ghcr.io": "gh"}}, r"to credHelpers\.ghcr\.io"),
        ({"auths": {"ghcr.io": {"identitytoken": "x"}}}, "has no user name with a password for ghcr.io"),
        ({"auths": [1]}, "is not JSON with auths"),
    ],
)
def test_a_login_that_cannot_be_read_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=rf"{words}.*MOTET_REGISTRY_USER and MOTET_REGISTRY_PASSWORD") as wrong:
        docker(**config)
    assert "\n" not in wrong.value.message


@pytest.mark.parametrize("text", [b"", b"[]", b"{" * 100_000, b"\xff", b" " * (1 << 20) + b"{}"])
def test_what_is_no_configuration_of_docker_is_refused(text: bytes) -> None:
    with pytest.raises(SetupError, match=r"config\.json is no JSON object"):
        registry_account.login_in(text, IMAGE, Path("config.json"))


def test_variables_come_before_the_login_of_docker(tmp_path: Path) -> None:
    environment = {"DOCKER_CONFIG": str(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"ghcr.io": LOGIN}}))
    assert registry_account.account_of(IMAGE, "", "", environment) == ("me", "geheim")
    assert registry_account.account_of(IMAGE, "you", "x", environment) == ("you", "x")
    assert registry_account.account_of(IMAGE, "", "", {"DOCKER_CONFIG": str(tmp_path / "none")}) is None
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    with pytest.raises(SetupError, match=r"config\.json can't be read: Is a directory\. Correct that, or set MOTET"):
        registry_account.account_of(IMAGE, "", "", {"DOCKER_CONFIG": str(tmp_path / "folder")})
    for user, password, missing in [("you", "", "PASSWORD"), ("", "x", "USER")]:
        with pytest.raises(SetupError, match=f"MOTET_REGISTRY_{missing} is missing"):
            registry_account.account_of(IMAGE, user, password, environment)


def test_the_variables_of_aws() -> None:
    usual = bucket.account_of(KEYS)
    assert (usual.region, usual.endpoint, usual.ca_file, usual.key.session_token) == ("us-east-1", "", "", "")
    more = {
        "AWS_SESSION_TOKEN": "t", "AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "eu-west-2", "AWS_CA_BUNDLE": "ca",
        "AWS_ENDPOINT_URL": "https://a:1", "AWS_ENDPOINT_URL_S3": "https://b:1/",
    }  # fmt: skip
    found = bucket.account_of(KEYS | more)
    assert (found.region, found.endpoint, found.ca_file) == ("eu-west-1", "https://b:1", "ca")
    assert found.key.session_token == "t"
    assert "geheim" not in repr(found)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"AWS_ACCESS_KEY_ID": ""}, "AWS_ACCESS_KEY_ID must be set"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY must be"),
        ({"AWS_REGION": "eu.west"}, "AWS_REGION is no region"),
        ({"AWS_ENDPOINT_URL": "minio:9000"}, "AWS_ENDPOINT_URL must be https://host:port"),
        ({"AWS_ENDPOINT_URL": "https://minio:9000/x"}, "without a path"),
        ({"AWS_SECRET_ACCESS_KEY": " \n"}, "AWS_SECRET_ACCESS_KEY must be set"),
        ({"AWS_ACCESS_KEY_ID": "AKI\nA1"}, "^AWS_ACCESS_KEY_ID has characters that no credential of AWS has"),
        ({"AWS_ACCESS_KEY_ID": "AKIÄ"}, "^AWS_ACCESS_KEY_ID has"),
        ({"AWS_SECRET_ACCESS_KEY": "geheim\x7f"}, "^AWS_SECRET_ACCESS_KEY has"),
        ({"AWS_SECRET_ACCESS_KEY": "geheim\udcff"}, "^AWS_SECRET_ACCESS_KEY has"),
        ({"AWS_SESSION_TOKEN": "geheim\r\nx: y"}, "^AWS_SESSION_TOKEN has"),
        ({"AWS_SESSION_TOKEN": "geheim\N{ZERO WIDTH SPACE}"}, "^AWS_SESSION_TOKEN has"),
    ],
)
def test_variables_of_aws_that_are_wrong(changed: dict[str, str], words: str) -> None:
    with pytest.raises(SetupError, match=words) as wrong:
        bucket.account_of(KEYS | changed)
    assert "geheim" not in wrong.value.message


def test_white_space_around_credentials_of_aws_is_left_out() -> None:
    given = {"AWS_ACCESS_KEY_ID": "AKIA1\n", "AWS_SECRET_ACCESS_KEY": "\tgeheim\r\n", "AWS_SESSION_TOKEN": " t\n"}
    assert bucket.account_of(given).key == AccessKey("AKIA1", "geheim", "t")
    assert bucket.account_of(KEYS | {"AWS_SESSION_TOKEN": "\n"}).key == AccessKey("AKIA1", "geheim")


@pytest.mark.parametrize(
    ("to", "words"),
    [
        ("https://host/x", r"--to must be s3://bucket/folder or oci://ghcr\.io/acme/pirate:v1"),
        ("s3://B/x", "--to: s3://B/x does not name a bucket"),
        ("s3://bucket/../x", r"'\.\.' in its path"),
        ("s3://ab", "--to: s3://ab does not name a bucket.* has 3 to 63 lower-case letters"),
        ("oci://localhost:99999/r", "--to: oci://localhost:99999/r.* names port 99999. Name one from 1 to 65535"),
        ("oci://ghcr.io", "--to: oci://ghcr.io must name a registry, a repository in it"),
        (f"oci://{IMAGE}@sha256:{'0' * 64}", "--to takes a tag and no digest"),
    ],
)
def test_what_is_no_destination(to: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        destination_of(to, Settings(), KEYS)


def test_a_prefix_is_as_long_as_runners_read_it_with_the_folder_of_the_adapter() -> None:
    folder = "ä" + "a" * (s3.MAX_PREFIX_BYTES - len("ä".encode()) - len("/0123456789abcdef") - 1)
    uri = destination_of(f"s3://bucket/{folder}", Settings(), KEYS).source([], Digest(f"sha256:{'a' * 64}"))["uri"]
    assert s3.parse(uri, "").prefix == f"{folder}/{'a' * 16}/"
    with pytest.raises(SetupError, match="--to: The path of the source's URI has 900 bytes or more"):
        destination_of(f"s3://bucket/{folder}a", Settings(), KEYS)


def test_the_manifest_of_an_artifact_is_what_runners_read_and_depends_on_the_files_alone() -> None:
    files = [blob_of("b.safetensors", b"weights"), blob_of("a.json", b"{}")]
    manifest = manifest_of(files)
    assert manifest.digest == manifest_of(files[::-1]).digest
    layers = read(b"".join(manifest.chunks()), "")
    assert layers == {one.name: Layer(one.digest, one.size) for one in files}
    assert EMPTY.digest == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pool": None}, "(?s)not running.*--pool NAMESPACE/NAME"),
        ({"pool": "motet-pools/De_mo"}, "--pool: "),
        ({"pool": "Motet/demo"}, "--pool: "),
        ({"secret": "Nö"}, "--secret: "),
        ({"model": None}, "no --model was given"),
        ({"name": "Desk!"}, "--as: "),
        ({"to": "s3://models/acme@home"}, "--to: must not contain"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_sent(
    upload: Upload, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], words: str
) -> None:
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": "https://127.0.0.1:1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SetupError, match=words):
        upload(PIRATE, **({"to": "s3://models/pirate"} | given))
