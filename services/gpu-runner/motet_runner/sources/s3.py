"""Folders in buckets of an object store: AWS S3, or a store with the same API."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from motet.errors import AdapterFetchFailed
from motet.sources import STORE_ENDPOINT
from motet_runner.sources.fetch_errors import credentials
from motet_runner.sources.fetch_order import NetworkAccess
from motet_runner.sources.remote_source import Opening, OpenSource

if TYPE_CHECKING:  # only a fetch process has it
    from motet_runner.sources.secret import SourceCredentials

_ENDPOINT = re.compile(r"https?://([A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:[0-9]{1,5})?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")

MAX_PREFIX_BYTES = 900
"""Stores allow names of 1,024 bytes, with that of the file."""


@dataclass(frozen=True, slots=True)
class S3Uri:
    bucket: str
    prefix: str
    """The names of all files in the folder begin with it. It ends with a slash, or is empty for the whole bucket."""

    def hosts(self, access: NetworkAccess, secret: "SourceCredentials") -> list[tuple[str, int]]:
        parts = urlsplit(access.s3_endpoint)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return [(parts.hostname, port)] if parts.hostname and not _own_endpoint(access, secret) else []

    def open(self, opening: Opening) -> OpenSource:
        from motet_runner.sources.s3_folder import S3Folder

        access = opening.order.access
        own = _own_endpoint(access, opening.secret)
        if own and not (own.startswith("https://") and is_endpoint(own)):
            raise credentials(
                f"{STORE_ENDPOINT} of the Secret in source.credentialsSecretRef must be the store's address as "
                "https://host:port, without a path. Correct it."
            )
        return S3Folder(self, own or _plain(access.s3_endpoint), opening)


def _own_endpoint(access: NetworkAccess, secret: "SourceCredentials") -> str:
    """The endpoint that the Secret names, if it is not the platform's. Only https, to addresses that are allowed."""
    endpoint = _plain(secret.values.get(STORE_ENDPOINT, ""))
    return "" if endpoint == _plain(access.s3_endpoint) else endpoint


def _plain(endpoint: str) -> str:
    """Without the port that its scheme has anyway"""
    plain = endpoint.rstrip("/").lower()
    return plain.removesuffix(":443" if plain.startswith("https:") else ":80")


def is_endpoint(text: str) -> bool:
    """Whether it is http(s)://host or http(s)://host:port, without a slash at its end."""
    try:
        return _ENDPOINT.fullmatch(text) is not None and bool(urlsplit(text).hostname) and urlsplit(text).port != 0
    except ValueError:  # a port that no machine has
        return False


def parse(uri: str, _: str) -> S3Uri:
    bucket, _, path = uri.removeprefix("s3://").partition("/")
    path = path.removesuffix("/")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket:
        raise AdapterFetchFailed(
            f"{uri} does not name a bucket, as s3://bucket/folder does. A bucket's name has 3 to 63 lower-case "
            "letters, digits, '.' and '-', and begins and ends with a letter or digit."
        )
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise AdapterFetchFailed(f"{uri} has an empty part, '.' or '..' in its path. Write s3://bucket/folder.")
    if len(path.encode()) >= MAX_PREFIX_BYTES:
        raise AdapterFetchFailed(
            f"The path of the source's URI has {MAX_PREFIX_BYTES} bytes or more. Use a shorter one."
        )
    return S3Uri(bucket, f"{path}/" if path else "")


def root_of(bucket: str, endpoint: str, region: str) -> str:
    """The URL below which the bucket's files lie. `endpoint`: empty for AWS."""
    aws = f"s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    if endpoint:
        return f"{endpoint}/{bucket}/"
    if "." in bucket:  # no certificate has a name for it
        return f"https://{aws}/{bucket}/"
    return f"https://{bucket}.{aws}/"
