"""Parses a source's URI, and refuses URIs that are not allowed.

Which schemes an object may name is decided in `motet.resources.source_uris`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from motet.errors import AdapterFetchFailed

SOURCES = "file:///folder, hf://org/name or https://host/folder/"

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


@dataclass(frozen=True, slots=True)
class FolderUri:
    """A folder of this machine, or of a volume that is mounted there."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubUri:
    repository: str
    revision: str


@dataclass(frozen=True, slots=True)
class WebUri:
    url: str
    """The URL of a folder: it ends with a slash."""


def parse(uri: str, revision: str = "") -> FolderUri | HubUri | WebUri:
    """Raises AdapterFetchFailed, which says what is wrong. The message never contains what may be a password."""
    try:
        parts = urlsplit(uri)
        host = parts.hostname
        _ = parts.port
    except ValueError as error:
        raise AdapterFetchFailed(f"The source is not a URI ({error}). Write {SOURCES}.") from None
    match parts.scheme:
        case "file":
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise AdapterFetchFailed(f"{uri} is not a folder of this machine. Write file:///absolute/path.")
            return FolderUri(Path(unquote(parts.path)))
        case "hf":
            repository = uri.removeprefix("hf://").rstrip("/")
            if not _REPOSITORY.fullmatch(repository) or ".." in repository:
                raise AdapterFetchFailed(f"{uri} is not a repository. Write hf://org/name.")
            if revision and (not _REVISION.fullmatch(revision) or ".." in revision):
                raise AdapterFetchFailed(f"source.revision {revision!r} is not a branch, tag or commit. Correct it.")
            return HubUri(repository, revision or "main")
        case "https":
            if parts.username is not None or parts.password is not None:
                raise AdapterFetchFailed(
                    "The source's URI has a user name or a password. Put them into a Secret, and name the Secret in "
                    "source.credentialsSecretRef.",
                    reason="CredentialsInvalid",
                )
            if not host or not parts.path.endswith("/") or parts.query or parts.fragment:
                raise AdapterFetchFailed(
                    f"https://{host or ''}… must be the URL of a folder that has the files. It must end with a slash "
                    "and have no ? or #."
                )
            return WebUri(uri)
        case scheme:
            raise AdapterFetchFailed(f"Motet cannot read {scheme or uri}:// sources yet. Use {SOURCES}.")
