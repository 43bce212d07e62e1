"""What a registry says of how it wants to be asked, and the token that its realm sends. Pure; it believes neither."""

import re
from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

import orjson

MAX_CHALLENGE_CHARACTERS = 4096

_SCHEME = re.compile(r"(?:^|,)\s*(Basic|Bearer)\s", re.IGNORECASE)
_PARAMETER = re.compile(r'([a-z]+)\s*=\s*"([^"]*)"', re.IGNORECASE)
_TOKEN = re.compile(r"[!-~]+")


def realm_of(challenge: str) -> Mapping[str, str] | None:
    """The parameters with which a token is asked for. None: the registry wants no token."""
    challenge = challenge[:MAX_CHALLENGE_CHARACTERS]
    asked = {found[1].lower(): challenge[found.end() :] for found in _SCHEME.finditer(challenge)}
    if "bearer" not in asked:
        return None
    given: dict[str, str] = {}
    for found in _PARAMETER.finditer(asked["bearer"]):
        given.setdefault(found[1].lower(), found[2])
    return given


def host_of(realm: Mapping[str, str]) -> str | None:
    """None: it is no https:// URL with a host."""
    url = realm.get("realm", "")
    if not url.startswith("https://"):
        return None
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def token_url(realm: Mapping[str, str], scope: str) -> str:
    url = realm["realm"]
    query = {"scope": scope} | ({"service": realm["service"]} if "service" in realm else {})
    return f"{url}{'&' if urlsplit(url).query else '?'}{urlencode(query)}"


def token_in(body: bytes) -> str | None:
    try:
        answer = orjson.loads(body)
        token = answer.get("token") or answer.get("access_token")
    except (orjson.JSONDecodeError, AttributeError):
        return None
    return token if isinstance(token, str) and _TOKEN.fullmatch(token) else None
