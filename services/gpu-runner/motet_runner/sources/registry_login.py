"""Finds out how a registry wants to be asked: with the Secret itself, or with a token that its realm gives for it."""

import re
from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

import orjson

from motet_runner.sources.fetch_errors import credentials, forbidden, missing, temporary
from motet_runner.sources.remote_source import Opening
from motet_runner.sources.web_requests import PASSING, Interrupted, WebRequests, check_plain, retry_after

MAX_CHALLENGE_CHARACTERS = 4096
MAX_TOKEN_BYTES = 64 << 10
"""The most bytes of the realm's answer. Tokens have some thousand."""

_SCHEME = re.compile(r"(?:^|,)\s*(Basic|Bearer)\s", re.IGNORECASE)
_PARAMETER = re.compile(r'([a-z]+)\s*=\s*"([^"]*)"', re.IGNORECASE)
_TOKEN = re.compile(r"[!-~]+")


class RegistryLogin(WebRequests):
    """The Secret goes to the registry and to the realm that it names, and to no host that these redirect to."""

    def __init__(self, name: str, repository: str, opening: Opening) -> None:
        super().__init__(name, opening.client, opening.secret.header, opening.pause, on_checked=opening.on_checked)
        self._scope = f"repository:{repository}:pull"

    def answer(self, challenge: str) -> Mapping[str, str]:
        """The header that opens the registry. Raises Interrupted, and AdapterFetchFailed if there is none."""
        challenge = challenge[:MAX_CHALLENGE_CHARACTERS]
        asked = {found[1].lower(): challenge[found.end() :] for found in _SCHEME.finditer(challenge)}
        if "bearer" in asked:
            return {"authorization": f"Bearer {self._token(asked['bearer'])}"}
        if self._authorization:
            return self._authorization
        raise credentials(f"{self.name} answers 401: it is not public. Name a Secret in source.credentialsSecretRef.")

    def _token(self, words: str) -> str:
        given: dict[str, str] = {}
        for found in _PARAMETER.finditer(words):
            given.setdefault(found[1].lower(), found[2])
        realm = given.get("realm", "")
        host = _host_of(realm)
        if host is None:
            raise forbidden(
                f"source.image: the registry of {self.name} has no realm with https:// and a host. Name another one."
            )
        query = {"scope": self._scope} | ({"service": given["service"]} if "service" in given else {})
        url = f"{realm}{'&' if urlsplit(realm).query else '?'}{urlencode(query)}"
        with self._answer(url, {}) as response:
            status = response.status_code
            says = f"{host}, which gives the registry's tokens, answers {status}"
            if status in PASSING:
                raise Interrupted(says, retry_after(response))
            if status in (401, 403):
                wrong = "does not accept the Secret" if self._authorization else "asks for a Secret: name one"
                raise credentials(f"{self.name}: {says} and {wrong} in source.credentialsSecretRef.")
            if status != 200:
                raise missing(f"source.image: {says} for {self.name}. Correct the reference.")
            check_plain(response, f"the token of {self.name}")
            body = self._body(response, MAX_TOKEN_BYTES)
        try:
            answer = orjson.loads(body)
            token = answer.get("token") or answer.get("access_token")
        except (orjson.JSONDecodeError, AttributeError):
            token = None
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise temporary(f"{self.name}: {host}, which gives the registry's tokens, did not send one.")
        return token


def _host_of(realm: str) -> str | None:
    if not realm.startswith("https://"):
        return None
    try:
        return urlsplit(realm).hostname
    except ValueError:
        return None
