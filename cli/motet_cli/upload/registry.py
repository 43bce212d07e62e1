"""Sends an artifact to an OCI registry: first its blobs, then the manifest that names them."""

import base64
from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import urljoin

import orjson

from motet.errors import SetupError
from motet_cli.upload.artifact import EMPTY, FILE_TYPE, manifest_of
from motet_cli.upload.blobs import Blob, blob_of, changed
from motet_cli.upload.exchange import Answer, Exchange, Peer
from motet_cli.upload.registry_account import VARIABLES
from motet_runner.sources.oci import OciUri
from motet_runner.sources.oci_manifest import MANIFEST, shown
from motet_runner.sources.registry_challenge import host_of, realm_of, token_in, token_url
from motet_runner.sources.web_requests import PASSING, Interrupted, origin

THERE, NOT_THERE = 200, 404
ELSEWHERE = (301, 302, 307, 308)
"""A blob lies in another store. Registries do not agree on the status."""


class Registry:
    """A repository and a tag of it."""

    def __init__(self, uri: OciUri, account: tuple[str, str] | None) -> None:
        self.name = f"oci://{uri.registry}/{uri.repository}:{uri.tag}"
        self._uri = uri
        self._own: Mapping[str, str] = {}
        if account is not None:
            basic = base64.b64encode(":".join(account).encode()).decode()
            self._own = {"authorization": f"Basic {basic}"}
        self._authorization: Mapping[str, str] = {}
        """What the registry has asked for"""

    def send(self, files: Sequence[Blob], *, may_replace: bool) -> list[str]:
        """The names of the files that were not there yet. `may_replace`: the tag may name another artifact until
        now."""
        manifest = manifest_of(files)
        with Exchange(Peer(name=self.name, address_from="--to")) as exchange:
            tagged = exchange.patiently("the tag", partial(self._tagged, exchange))
            if tagged == manifest.digest:
                return []
            if tagged and not may_replace:
                raise SetupError(f"{self.name} is there, and names another artifact. Name a tag of your own in --to.")
            sent = [one for one in (EMPTY, *files) if exchange.patiently(one.name, partial(self._sent, exchange, one))]
            exchange.patiently(manifest.name, partial(self._put_manifest, exchange, manifest))
        return [one.name for one in sent if one is not EMPTY]

    def _tagged(self, exchange: Exchange) -> str:
        """What the tag names; empty if there is no such tag."""
        url = f"{self._uri.url}manifests/{self._uri.tag}"
        answer = self._ask(exchange, "GET", url, {"accept": MANIFEST})
        if answer.status == THERE:
            return blob_of("", answer.body).digest
        if answer.status == NOT_THERE:
            return ""
        raise self._refusal(answer, "the tag")

    def _sent(self, exchange: Exchange, blob: Blob) -> bool:
        """False: it was there."""
        answer = self._ask(exchange, "HEAD", f"{self._uri.url}blobs/{blob.digest}", {})
        if answer.status in (THERE, *ELSEWHERE):
            return False
        if answer.status != NOT_THERE:
            raise self._refusal(answer, blob.name)
        answer = self._ask(exchange, "POST", f"{self._uri.url}blobs/uploads/", {})
        if answer.status != 202:
            raise self._refusal(answer, blob.name)
        url = _place(self._uri.url, answer.headers.get("location", ""))
        if not url:
            raise SetupError(
                f"{self.name}: the registry names no https:// URL to which {blob.name} can be sent. Correct the "
                "address that it has of itself."
            )
        url += f"{'&' if '?' in url else '?'}digest={blob.digest}"
        answer = self._ask(exchange, "PUT", url, {"content-type": FILE_TYPE}, blob)
        if answer.status not in (201, 204):
            raise self._refusal(answer, blob.name)
        return True

    def _put_manifest(self, exchange: Exchange, manifest: Blob) -> None:
        url = f"{self._uri.url}manifests/{self._uri.tag}"
        answer = self._ask(exchange, "PUT", url, {"content-type": MANIFEST}, manifest)
        if answer.status not in (200, 201):
            raise self._refusal(answer, manifest.name)
        stored = answer.headers.get("docker-content-digest", manifest.digest)
        if stored != manifest.digest:
            raise SetupError(f"{self.name}: the registry has stored another manifest, {shown(stored)}. Push again.")

    # ------------------------------------------------------------------------------------------------------ requests

    def _ask(
        self, exchange: Exchange, method: str, url: str, headers: Mapping[str, str], blob: Blob | None = None
    ) -> Answer:
        """Only the registry's own host gets what opens it. Tokens end, perhaps in the middle of a push."""
        try:
            home = origin(url) == origin(self._uri.url)
        except ValueError:  # of its port
            raise SetupError(f"{self.name}: the registry names {shown(url)}, which is no address.") from None
        answer = exchange.send(method, url, {**headers, **(self._authorization if home else {})}, blob)
        if answer.status == 401 and home:
            self._authorization = self._opened(exchange, answer.headers.get("www-authenticate", ""))
            answer = exchange.send(method, url, {**headers, **self._authorization}, blob)
        if answer.status in PASSING:
            raise Interrupted(f"the registry answers {answer.status}", answer.retry_after)
        return answer

    def _opened(self, exchange: Exchange, challenge: str) -> Mapping[str, str]:
        realm = realm_of(challenge)
        if realm is None:
            if not self._own:
                raise self._no_login()
            return self._own
        host = host_of(realm)
        if host is None:
            raise SetupError(f"{self.name}: the registry has no realm with https:// and a host. Choose another one.")
        answer = exchange.send("GET", token_url(realm, f"repository:{self._uri.repository}:pull,push"), self._own)
        says = f"{host}, which gives the registry's tokens, answers {answer.status}"
        if answer.status in PASSING:
            raise Interrupted(says, answer.retry_after)
        if answer.status in (401, 403):
            raise SetupError(f"{self.name}: {says}: it does not accept the login. {self._how_to_log_in}")
        token = token_in(answer.body) if answer.status == THERE else None
        if token is None:
            raise SetupError(f"{self.name}: {says} and sends no token. Correct --to.")
        return {"authorization": f"Bearer {token}"}

    @property
    def _how_to_log_in(self) -> str:
        return f"Log in (docker login {self._uri.registry}), or set {VARIABLES}."

    def _no_login(self) -> SetupError:
        return SetupError(f"{self.name} answers 401: it asks for a login. {self._how_to_log_in}")

    def _refusal(self, answer: Answer, what: str) -> SetupError:
        code, message = _error_in(answer.body)
        says = f"{self.name}: the registry answers {answer.status} {code}".rstrip() + f" for {what}"
        why = f" ({message})" if message else ""
        if answer.status == 507 or "quota" in message.lower():
            return SetupError(f"{says}{why}: it is full. Make room there, or choose another repository in --to.")
        if answer.status == 401 and not self._own:
            return self._no_login()
        if answer.status in (401, 403):
            return SetupError(
                f"{says}{why}: the login is wrong, or may not push to {self._uri.repository}. {self._how_to_log_in}"
            )
        if answer.status == NOT_THERE:
            return SetupError(
                f"{says}{why}: there is no repository {self._uri.repository}. Create it, or correct --to."
            )
        if answer.status == 413:
            return SetupError(f"{says}{why}: it is larger than the registry, or a proxy before it, takes.")
        if code == "DIGEST_INVALID":
            return changed(what)
        return SetupError(f"{says}{why}.")


def _place(registry: str, location: str) -> str:
    """The URL to which a registry sends on. Empty: it is none with https://."""
    try:
        url = urljoin(registry, location)
        return url if location and origin(url)[0] == "https" else ""
    except ValueError:
        return ""


def _error_in(body: bytes) -> tuple[str, str]:
    """The code and the message of the first error; empty where there is none."""
    try:
        first = orjson.loads(body)["errors"][0]
        code, message = first.get("code"), first.get("message")
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError):
        return "", ""
    return _plain(code), _plain(message)


def _plain(text: object) -> str:
    return shown(text).strip("'\"") if isinstance(text, str) else ""
