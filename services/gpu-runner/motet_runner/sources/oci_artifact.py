"""Fetches the files of an artifact in a registry. Manifests and layers have the digests by which they are named."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx2

from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_errors import credentials, malformed, missing, temporary, too_large
from motet_runner.sources.file_digest import sha256_of
from motet_runner.sources.file_selection import WantedFile
from motet_runner.sources.oci import OciUri
from motet_runner.sources.oci_manifest import (
    ACCEPTED,
    MAX_INDEX_DEPTH,
    MAX_MANIFEST_BYTES,
    MAX_MANIFESTS,
    ContainerImage,
    Files,
    NoManifest,
    NotAnArtifact,
    read,
    shown,
)
from motet_runner.sources.registry_login import RegistryLogin
from motet_runner.sources.remote_source import Opening
from motet_runner.sources.tar_layer import LargerThanLimit, NotOneFile, unpack
from motet_runner.sources.web_folder import WebFolder, size_of, tag_in
from motet_runner.sources.web_requests import PASSING, Interrupted, check_plain, number, retry_after


class OciArtifact(WebFolder):
    """The files of one manifest. A tag is asked for once: if it moves during the fetch, there is no mixture."""

    def __init__(self, uri: OciUri, opening: Opening) -> None:
        super().__init__(uri.url, opening.client, {}, opening.need, opening.pause, on_checked=opening.on_checked)
        self.name = opening.order.uri
        self._given = bool(opening.secret.header)
        self._login = RegistryLogin(self.name, uri.repository, opening)
        self._pinned = bool(uri.digest)
        self._manifests_read: set[str] = set()
        """Their digests"""
        try:
            artifacts = self._artifacts(uri.digest or uri.tag)
            if not artifacts:
                raise ContainerImage
            if len(artifacts) > 1:
                raise NotAnArtifact(f"is an index of {len(artifacts)} artifacts. Name one of them by its digest")
        except NotAnArtifact as wrong:
            raise self._malformed(f"{self.name} {wrong}.") from None
        self._layers = artifacts[0]
        self.sizes = {name: layer.size for name, layer in self._layers.items()}

    def _malformed(self, what: str) -> AdapterFetchFailed:
        """For what another push mends: it moves a tag, and leaves a digest as it is."""
        then = (
            "After a push, name the new digest: this one always names the same bytes."
            if self._pinned
            else "Motet reads the tag again automatically."
        )
        return malformed(f"source.image: {what} {then}", again=not self._pinned)

    def _artifacts(self, reference: str, depth: int = 0) -> list[Files]:
        """What the reference names, or the manifests that its index names. Container images in an index are left out,
        as builders add some that describe the build. What several indexes name counts once."""
        if len(self._manifests_read) == MAX_MANIFESTS:
            raise NotAnArtifact(f"has more than {MAX_MANIFESTS} manifests in its indexes. Name the one with the files")
        found = self._patiently(lambda: self._manifest(reference), lambda: 0, self.name)
        if not isinstance(found, list):
            return [found]
        if depth == MAX_INDEX_DEPTH:
            raise NotAnArtifact(f"has indexes more than {MAX_INDEX_DEPTH} deep. Name the manifest that has the files")
        artifacts: list[Files] = []
        for digest in found:
            if digest in self._manifests_read:
                continue
            with suppress(ContainerImage):
                artifacts += self._artifacts(digest, depth + 1)
        return artifacts

    def _manifest(self, reference: str) -> Files | list[str]:
        with self._answer(f"{self.url}manifests/{reference}", {"accept": ", ".join(ACCEPTED)}) as response:
            self._check(response, self.name)
            body = self._body(response, MAX_MANIFEST_BYTES + 1)
        if len(body) > MAX_MANIFEST_BYTES:
            raise NotAnArtifact(
                f"has a manifest of more than {MAX_MANIFEST_BYTES} bytes. Push only the adapter's files"
            )
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if reference.startswith("sha256:") and reference != digest:
            raise Interrupted(f"the registry sends a manifest of the digest {digest} for {reference}")
        self.revision = self.revision or digest
        self._manifests_read.add(digest)
        try:
            return read(body, response.headers.get("content-type", ""))
        except NoManifest as wrong:
            if reference == digest:
                raise
            raise temporary(
                f"source.image: {self.name} {wrong}. It may be a passing answer: Motet tries again automatically."
            ) from None

    def fetch(self, file: WantedFile, into: Path) -> bool:
        if file.name not in self._layers:
            return False
        packing = self._layers[file.name].packing
        if packing not in ("", "tar"):
            raise self._malformed(f"{self._named(file)} is packed as {shown(packing)}. Push it as it is, or as a tar.")
        return super().fetch(file, into)

    def _once(self, file: WantedFile, part: Path, tag: Path) -> None:
        layer = self._layers[file.name]
        kept, unpacked = tag_in(tag), f"{layer.digest} unpacked"
        if kept == f"{unpacked} {size_of(part)}":
            self._check_size(file, part)
            return
        if kept != layer.digest or size_of(part) > layer.size:
            part.unlink(missing_ok=True)
        if not part.exists() or size_of(part) < layer.size:
            try:
                super()._once(WantedFile(file.name, layer.size), part, tag)
            except AdapterFetchFailed as failure:
                raise (self._another(file) if failure.reason == "TooLarge" else failure) from None
        if size_of(part) != layer.size or f"sha256:{sha256_of(part, self._on_checked)}" != layer.digest:
            part.unlink()
            raise self._another(file)
        if layer.packing:
            tag.unlink()
            try:
                unpack(part, file.name, file.limit, self._on_checked)
            except LargerThanLimit as large:
                raise self._too_large(file, large.size) from None
            except NotOneFile as wrong:
                raise self._malformed(f"the layer of {self._named(file)} {wrong}. Push the file as it is.") from None
            tag.write_text(f"{unpacked} {size_of(part)}")
        self._check_size(file, part)

    def _check_size(self, file: WantedFile, part: Path) -> None:
        if (size := size_of(part)) > file.limit:
            raise self._too_large(file, size)

    def _too_large(self, file: WantedFile, size: int) -> AdapterFetchFailed:
        return too_large(f"{self._named(file)} has {size} bytes, but Motet fetches at most {file.limit}.")

    def _another(self, file: WantedFile) -> AdapterFetchFailed:
        return temporary(
            f"source.image: {file.name} of {self.name} comes with another size or digest than its manifest says. Motet "
            "tries again automatically. If that stays, push it again."
        )

    def _url_of(self, file: WantedFile) -> str:
        return f"{self.url}blobs/{self._layers[file.name].digest}"

    def _named(self, file: WantedFile) -> str:
        return f"{file.name} of {self.name}"

    def _tag_of(self, _: httpx2.Response, file: WantedFile) -> str:
        return self._layers[file.name].digest

    def _only_if(self, _: str) -> dict[str, str]:
        """Other bytes would have another URL, and the stores to which registries redirect have tags of their own."""
        return {}

    def _continues(self, response: httpx2.Response, tag: str) -> bool:  # noqa: ARG002 - see `_only_if`
        return True

    def _follow(self, url: str, headers: Mapping[str, str]) -> httpx2.Response:
        """Tokens end, perhaps in the middle of a fetch."""
        response = super()._follow(url, headers)
        if response.status_code != 401 or not self._is_home(response.url):
            return response
        response.close()
        self._authorization = self._login.answer(response.headers.get("www-authenticate", ""))
        return super()._follow(url, headers)

    def _is_home(self, url: httpx2.URL) -> bool:
        home = httpx2.URL(self.url)
        return (url.host, url.port) == (home.host, home.port)

    def _check_status(self, response: httpx2.Response, file: WantedFile) -> None:
        self._check(response, self._named(file))
        length = number(response.headers.get("content-length", ""))
        if response.status_code == 200 and length not in (None, self._layers[file.name].size):
            raise self._another(file)

    def _check(self, response: httpx2.Response, what: str) -> None:
        status = response.status_code
        if status in (200, 206, 416):
            return check_plain(response, what)
        at_home = self._is_home(response.url)
        who = "the registry" if at_home else f"{response.url.host}, to which the registry redirects,"
        if status in PASSING:
            busy = (
                ": it is asked too often, or without a Secret in source.credentialsSecretRef"
                if status == 429 and at_home
                else ""
            )
            raise Interrupted(f"{who} answers {status}{busy}", retry_after(response))
        if not at_home:
            raise missing(f"Motet cannot fetch {what}: {who} answers {status}.")
        if status in (401, 403):
            wrong = "may not pull from it" if self._given else "is missing"
            raise credentials(
                f"{self.name} answers {status}: there is no such repository, or the Secret in "
                f"source.credentialsSecretRef {wrong}."
            )
        if status == 404:
            raise missing(
                f"source.image: the registry answers 404 for {what}: it has no such repository, tag or digest. Correct "
                "the reference, or push it."
            )
        raise missing(f"Motet cannot fetch {what}: the registry answers {status}.")
