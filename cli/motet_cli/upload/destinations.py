"""Where `--to` sends an adapter, and how a manifest names it there.

In a bucket each adapter has a folder of its own, named by its digest, so a push changes no files that a manifest names.
In a registry without a tag in `--to` it has a tag of its own, for the same reason.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from motet.digest import hex_of
from motet.domain import Digest
from motet.errors import AdapterFetchFailed, SetupError
from motet.sources import BUCKET, REGISTRY
from motet_cli.settings import Settings
from motet_cli.upload import bucket, registry_account
from motet_cli.upload.artifact import manifest_of
from motet_cli.upload.blobs import Blob
from motet_cli.upload.bucket import Bucket
from motet_cli.upload.registry import Registry
from motet_runner.sources import oci, s3

FOLDER_DIGITS = 16
TAG_DIGITS = 12
ANY_DIGEST = Digest(f"sha256:{'0' * 64}")


class Destination(Protocol):
    def source(self, blobs: Sequence[Blob], digest: Digest) -> dict[str, str]:
        """The fields of a manifest's `spec.source` that name it."""

    def send(self, blobs: Sequence[Blob], digest: Digest) -> list[str]:
        """The names of the files that were not there yet. Raises SetupError."""


def destination_of(to: str, settings: Settings, environment: Mapping[str, str]) -> Destination:
    """Raises SetupError for what is no destination, and if a credential is missing or malformed."""
    try:
        if to.startswith(BUCKET.prefix):
            return _InBucket(s3.parse(to, ""), bucket.account_of(environment))
        if to.startswith(REGISTRY.prefix):
            return _InRegistry(to, settings, environment)
    except AdapterFetchFailed as wrong:
        said = wrong.message.removeprefix("source.image: ").replace(_tag_of(ANY_DIGEST), "")
        raise SetupError(f"--to: {said}") from None
    raise SetupError(f"--to must be {BUCKET.example} or {REGISTRY.example}.")


class _InBucket:
    def __init__(self, folder: s3.S3Uri, account: bucket.Account) -> None:
        self._folder = folder
        s3.parse(self.source([], ANY_DIGEST)["uri"], "")  # raises
        self._account = account

    def source(self, blobs: Sequence[Blob], digest: Digest) -> dict[str, str]:  # noqa: ARG002 - see Destination
        place = self._place(digest)
        return {"uri": f"{BUCKET.prefix}{place.bucket}/{place.prefix}".rstrip("/")}

    def send(self, blobs: Sequence[Blob], digest: Digest) -> list[str]:
        return Bucket(self._place(digest), self._account).send(blobs)

    def _place(self, digest: Digest) -> s3.S3Uri:
        return s3.S3Uri(self._folder.bucket, f"{self._folder.prefix}{hex_of(digest)[:FOLDER_DIGITS]}/")


class _InRegistry:
    def __init__(self, to: str, settings: Settings, environment: Mapping[str, str]) -> None:
        if "@" in to:
            raise SetupError("--to takes a tag and no digest: that of the artifact follows from the files.")
        self._to = to
        self._has_tag = ":" in to.removeprefix(REGISTRY.prefix).partition("/")[2]
        self._uri(ANY_DIGEST)  # raises
        self._account = registry_account.account_of(
            to.removeprefix(REGISTRY.prefix), settings.registry_user, settings.registry_password, environment
        )

    def source(self, blobs: Sequence[Blob], digest: Digest) -> dict[str, str]:
        uri = self._uri(digest)
        return {"image": f"{uri.registry}/{uri.repository}:{uri.tag}@{manifest_of(blobs).digest}"}

    def send(self, blobs: Sequence[Blob], digest: Digest) -> list[str]:
        return Registry(self._uri(digest), self._account).send(blobs, may_replace=self._has_tag)

    def _uri(self, digest: Digest) -> oci.OciUri:
        return oci.parse(self._to if self._has_tag else f"{self._to}{_tag_of(digest)}", "")


def _tag_of(digest: Digest) -> str:
    return f":motet-{hex_of(digest)[:TAG_DIGITS]}"
