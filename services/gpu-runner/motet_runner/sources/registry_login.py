"""Finds out how a registry wants to be asked: with the Secret itself, or with a token that its realm gives for it."""

from collections.abc import Mapping

from motet_runner.sources.fetch_errors import credentials, forbidden, missing, temporary
from motet_runner.sources.registry_challenge import host_of, realm_of, token_in, token_url
from motet_runner.sources.remote_source import Opening
from motet_runner.sources.web_requests import PASSING, Interrupted, WebRequests, check_plain, retry_after

MAX_TOKEN_BYTES = 64 << 10
"""The most bytes of the realm's answer. Tokens have some thousand."""


class RegistryLogin(WebRequests):
    """The Secret goes to the registry and to the realm that it names, and to no host that these redirect to."""

    def __init__(self, name: str, repository: str, opening: Opening) -> None:
        super().__init__(name, opening.client, opening.secret.header, opening.pause, on_checked=opening.on_checked)
        self._scope = f"repository:{repository}:pull"

    def answer(self, challenge: str) -> Mapping[str, str]:
        """The header that opens the registry. Raises Interrupted, and AdapterFetchFailed if there is none."""
        if (realm := realm_of(challenge)) is not None:
            return {"authorization": f"Bearer {self._token(realm)}"}
        if self._authorization:
            return self._authorization
        raise credentials(f"{self.name} answers 401: it is not public. Name a Secret in source.credentialsSecretRef.")

    def _token(self, realm: Mapping[str, str]) -> str:
        host = host_of(realm)
        if host is None:
            raise forbidden(
                f"source.image: the registry of {self.name} has no realm with https:// and a host. Name another one."
            )
        with self._answer(token_url(realm, self._scope), {}) as response:
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
            token = token_in(self._body(response, MAX_TOKEN_BYTES))
        if token is None:
            raise temporary(f"{self.name}: {host}, which gives the registry's tokens, did not send one.")
        return token
