"""Secrets of type kubernetes.io/dockerconfigjson, as docker, kubectl and people write them."""

import base64
import json

import pytest

from motet_runner.sources.docker_config import NoLogin, login_of

IMAGE = "ghcr.io/acme/pirate:v1"


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def config(**entries: object) -> bytes:
    return json.dumps({"auths": entries}, indent="\t").encode()


@pytest.mark.parametrize(
    ("key", "image"),
    [
        ("ghcr.io", IMAGE),
        ("https://ghcr.io", IMAGE),
        ("https://ghcr.io/v1/", IMAGE),
        ("http://GHCR.io/v2", IMAGE),
        ("ghcr.io/acme", IMAGE),
        ("ghcr.io/acme/pirate", IMAGE),
        ("ghcr.io/acme/pirate", f"ghcr.io/acme/pirate@sha256:{'0' * 64}"),
        ("reg:5000", "reg:5000/a:1"),
        ("https://index.docker.io/v1/", "docker.io/acme/pirate:v1"),
        ("docker.io", "registry-1.docker.io/acme/pirate:v1"),
    ],
)
def test_an_entry_is_for_a_registry_or_for_a_part_of_it(key, image):
    entry = {"username": "me", "password": "geheim", "auth": ""}
    assert login_of(config(**{key: entry}), image) == ("me", "geheim")
    assert login_of(config(**{key: {"auth": encoded("me:a:b\n{}")}}), image) == ("me", "a:b\n{}")


def test_the_entry_that_names_the_most_counts():
    entries = {key: {"username": key, "password": "x"} for key in ("ghcr.io/acme", "ghcr.io", "ghcr.io/acme/pirate2")}
    assert login_of(config(**entries), IMAGE) == ("ghcr.io/acme", "x")


@pytest.mark.parametrize(
    "key", ["ghcr.io.evil.example", "ghcr.io:5000", "ghcr.io/ac", "hcr.io", "", "/", "ghcr.io/acme/pirate:v1"]
)
def test_an_entry_for_another_registry_is_not_for_this_one(key):
    with pytest.raises(NoLogin, match=r"^has no entry for ghcr\.io\. Add one$"):
        login_of(config(**{key: {"username": "me", "password": "geheim"}}), IMAGE)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"auths": []}', b'{"auths": null}', b"\xff", b"[" * 100_000])
def test_what_is_no_config_is_refused(text):
    with pytest.raises(NoLogin, match="is not JSON with auths"):
        login_of(text, IMAGE)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        7,
        None,
        {"auth": "!"},
        {"auth": encoded("me")},
        {"auth": encoded(":x")},
        {"auth": 7},
        {"auth": base64.b64encode(b"\xff:\xff").decode()},
        {"username": "me"},
        {"username": "me", "password": 7},
        {"username": "", "password": "x"},
        {"identitytoken": "geheim"},
    ],
)
def test_an_entry_without_a_password_is_refused_and_not_repeated(entry):
    with pytest.raises(NoLogin, match="has no user name with a password for ghcr") as wrong:
        login_of(config(**{"ghcr.io": entry}), IMAGE)
    assert "geheim" not in str(wrong.value)
