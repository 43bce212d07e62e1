"""Reads the Secret for a source, from the API server or from local manifests. Only the fetch process does this."""

import base64
import binascii
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import orjson

from motet.sources import DOCKER_CONFIG, NOT_SECRET, PASSWORD, REGISTRY, SecretKeys
from motet_runner.sources.docker_config import NoLogin, login_of
from motet_runner.sources.fetch_errors import credentials, temporary
from motet_runner.sources.fetch_order import NetworkAccess

MAX_ANSWER_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class SourceCredentials:
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Key of the Secret → its value"""

    @property
    def token(self) -> str:
        return self.values.get("token", "")

    @property
    def header(self) -> dict[str, str]:
        if self.token:
            return {"authorization": f"Bearer {self.token}"}
        if "username" in self.values:
            basic = base64.b64encode(f"{self.values['username']}:{self.values['password']}".encode()).decode()
            return {"authorization": f"Basic {basic}"}
        return {}

    def scrub(self, text: str) -> str:
        """The text with every secret replaced."""
        secrets = [value for key, value in self.values.items() if key not in NOT_SECRET]
        for secret in (*secrets, *self.header.values()):
            if secret:
                text = text.replace(secret, "…").replace(quote(secret, safe=""), "…")
        return text


NO_CREDENTIALS = SourceCredentials()


def read_credentials(
    reference: str,
    access: NetworkAccess,
    accepted: Sequence[SecretKeys],
    options: SecretKeys = (),
    *,
    timeout: float,
    uri: str = "",
) -> SourceCredentials:
    """Raises AdapterFetchFailed, which says what to do. `accepted`: the sets of keys that the source can use.
    `options`: keys that it uses besides, if they are there; those that are not secret also alone. `uri`: of the
    source. The credentials of registries are for one of them."""
    if not reference:
        return NO_CREDENTIALS
    if not accepted:
        raise credentials("source.credentialsSecretRef: this source takes no Secret. Remove the field.")
    namespace, _, name = reference.partition("/")
    if access.manifests:
        data = _from_manifests(namespace, name, Path(access.manifests), accepted[0])
    elif access.api_server:
        data = _from_api_server(namespace, name, access, accepted[0], timeout)
    else:
        raise credentials(f"The runner cannot read Secret {reference}: it has neither an API server nor manifests.")
    return _credentials(reference, data, accepted, options, uri.removeprefix(REGISTRY.prefix))


def _credentials(
    reference: str, data: Mapping[str, bytes], accepted: Sequence[SecretKeys], options: SecretKeys, image: str
) -> SourceCredentials:
    wanted_keys = {key for keys in (*accepted, options) for key in keys}
    (docker,) = DOCKER_CONFIG
    if docker in wanted_keys & data.keys():
        try:
            return SourceCredentials(dict(zip(PASSWORD, login_of(data[docker], image), strict=True)))
        except NoLogin as wrong:
            raise credentials(f"Secret {reference}: {docker} {wrong}.") from None
    values = {key: data[key].decode("ascii", "replace").strip() for key in sorted(wanted_keys & data.keys())}
    if any(not value.isascii() or not value.isprintable() for value in values.values()):
        raise credentials(f"Secret {reference} has characters that are not allowed in an HTTP header. Remove them.")
    for keys in accepted:
        if values.keys() >= set(keys) and values[keys[0]]:
            return SourceCredentials({key: values[key] for key in (*keys, *options) if key in values})
    if values and values.keys() <= NOT_SECRET & set(options):
        return SourceCredentials(values)  # of a source that is open to everybody
    wanted = [_named(keys) for keys in accepted]
    if len(wanted) == 1:
        raise credentials(f"Secret {reference} must have {wanted[0]}, which the source needs. Add it.")
    raise credentials(f"Secret {reference} has neither {' nor '.join(wanted)}. Add one of them.")


def _named(keys: SecretKeys) -> str:
    return f"the key{'s' * (len(keys) > 1)} {' and '.join(keys)}"


def _from_manifests(namespace: str, name: str, folder: Path, usual: SecretKeys) -> dict[str, bytes]:
    from motet.resources import Secret, files_of, read_file  # this import is slow, and not needed in a cluster

    for path in files_of(folder):
        for manifest in read_file(path).manifests:
            found = manifest.resource
            if isinstance(found, Secret) and (found.metadata.namespace, found.metadata.name) == (namespace, name):
                return _decode(f"{namespace}/{name}", found.data) | {
                    key: value.encode() for key, value in found.string_data.items()
                }
    raise credentials(f"There is no Secret {namespace}/{name} in {folder}. Add one with {_named(usual)}.")


def _from_api_server(
    namespace: str, name: str, access: NetworkAccess, usual: SecretKeys, timeout: float
) -> dict[str, bytes]:
    account = Path(access.service_account)
    try:
        token = (account / "token").read_text().strip()
        trust = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as error:
        raise credentials(
            f"The runner cannot read Secret {namespace}/{name}: it has no service account token "
            f"({error.strerror}: {error.filename})."
        ) from None
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/secrets/{quote(name, safe='')}"
    try:
        with (
            httpx2.Client(verify=trust, trust_env=False, timeout=timeout) as client,
            client.stream(
                "GET",
                access.api_server + path,
                headers={"authorization": f"Bearer {token}", "accept-encoding": "identity"},
            ) as response,
        ):
            status = response.status_code
            body = b""
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise temporary(
                        f"The API server sent more than {MAX_ANSWER_BYTES} bytes for Secret {namespace}/{name}."
                    )
    except httpx2.HTTPError as error:
        raise temporary(
            f"The API server does not answer ({type(error).__name__}). Motet tries again automatically."
        ) from None
    match status:
        case 200:
            try:
                return _decode(f"{namespace}/{name}", orjson.loads(body).get("data") or {})
            except (orjson.JSONDecodeError, AttributeError):
                raise temporary(f"The API server did not send a Secret when asked for {namespace}/{name}.") from None
        case 403:
            raise credentials(_how_to_grant(namespace, name, token))
        case 404:
            raise credentials(f"There is no Secret {namespace}/{name}. Create one with {_named(usual)}.")
        case _:
            raise temporary(f"The API server answers {status} when asked for Secret {namespace}/{name}.")


def _how_to_grant(namespace: str, name: str, token: str) -> str:
    own, account = _account(token)
    grant = f"motet-{name}"[:63]
    return (
        f"The runners may not read Secret {namespace}/{name}. To allow it: kubectl -n {namespace} create role {grant} "
        f"--verb=get --resource=secrets --resource-name={name}; kubectl -n {namespace} create rolebinding {grant} "
        f"--role={grant} --serviceaccount={own}:{account}"
    )


def _account(token: str) -> tuple[str, str]:
    """The owner of a token, for a message: (namespace, service account)."""
    try:
        claims = token.split(".")[1]
        subject: str = orjson.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["sub"]
        _, _, own, account = subject.split(":")
    except (IndexError, KeyError, ValueError, TypeError, AttributeError):
        return "<namespace of the pool>", "<service account of its runners>"
    return own, account


def _decode(reference: str, data: Mapping[str, Any]) -> dict[str, bytes]:
    try:
        return {key: base64.b64decode(value, validate=True) for key, value in data.items()}
    except (binascii.Error, TypeError, ValueError):
        raise credentials(f"Secret {reference} has data that is not base64. Encode it.") from None
