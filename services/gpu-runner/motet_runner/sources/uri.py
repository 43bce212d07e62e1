"""Parses a source's URI, and refuses URIs that are not allowed.

`motet.sources` declares the schemes, and the module that reads each scheme.
"""

import re
from importlib import import_module
from urllib.parse import unquote, urlsplit

from motet.errors import AdapterFetchFailed
from motet.sources import EXAMPLES, READABLE, SOURCES, folder_of, refusal
from motet_runner.sources.folder import FolderUri
from motet_runner.sources.remote_source import RemoteSource

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PINNED = re.compile(r"oci://[^@]*@sha256:[0-9a-f]{64}")


def parse(uri: str, revision: str = "") -> FolderUri | RemoteSource:
    """Raises AdapterFetchFailed, which says what is wrong, and repeats nothing that may be a password."""
    if _CONTROL.search(unquote(uri)):
        raise AdapterFetchFailed("source.uri: must have no control characters, not even written with '%'.")
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError:  # its text repeats a part of the URI
        raise AdapterFetchFailed(
            f"The source is not a URI: its host or port makes no sense. Write {EXAMPLES}."
        ) from None
    if why := refusal(parts.scheme, READABLE):
        raise AdapterFetchFailed(f"source.uri: {why}.")
    if "@" in uri and folder_of(uri) is None and not _PINNED.fullmatch(uri):
        raise AdapterFetchFailed(
            "The source's URI has a user name or a password. Put them into a Secret, and name the Secret in "
            "source.credentialsSecretRef.",
            reason="CredentialsInvalid",
        )
    module = import_module(f"motet_runner.sources.{SOURCES[parts.scheme].read_by}")
    parsed: FolderUri | RemoteSource = module.parse(uri, revision)
    return parsed
