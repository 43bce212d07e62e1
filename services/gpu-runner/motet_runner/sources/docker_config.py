"""Reads a registry's user name and password from what `docker login` and `kubectl create secret docker-registry` write.
Pure."""

import base64
import binascii

import orjson

_HUB = ("docker.io", "index.docker.io", "registry-1.docker.io")


class NoLogin(Exception):
    """Says what is wrong, as the end of a sentence."""


class NoEntry(NoLogin):
    """None of the entries is for this registry."""


def login_of(config: bytes, image: str) -> tuple[str, str]:
    """Of the entry that names the most of `registry/repository:tag`. Raises NoLogin."""
    try:
        entries = orjson.loads(config)["auths"].items()
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise NoLogin("is not JSON with auths. Create it with: kubectl create secret docker-registry") from None
    registry, _, path = image.partition("/")
    repository = path.partition("@")[0].partition(":")[0]
    wanted = f"{_host(registry)}/{repository}/"
    found = [(place, entry) for key, entry in entries if wanted.startswith(place := _place(key))]
    if not found:
        raise NoEntry(f"has no entry for {registry}. Add one")
    _, entry = max(found, key=lambda one: len(one[0]))
    try:
        if entry.get("auth"):
            user, colon, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
        else:
            user, colon, password = entry["username"], ":", entry["password"]
    except (AttributeError, KeyError, TypeError, ValueError, binascii.Error):
        user = colon = password = ""
    if not (colon and isinstance(user, str) and user and isinstance(password, str) and password):
        raise NoLogin(f"has no user name with a password for {registry}. Add them")
    return user, password


def _place(key: str) -> str:
    """The start of the images that an entry is for. Docker writes some keys as URLs of the registry's API."""
    host, _, path = key.removeprefix("https://").removeprefix("http://").strip("/").partition("/")
    return f"{_host(host)}/{'' if path in ('', 'v1', 'v2') else f'{path}/'}"


def _host(name: str) -> str:
    return _HUB[0] if name.lower() in _HUB else name.lower()
