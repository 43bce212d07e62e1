"""Repositories of a hub, or of a mirror with the same API."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from motet.errors import AdapterFetchFailed
from motet_runner.sources.fetch_order import NetworkAccess
from motet_runner.sources.remote_source import Opening, OpenSource

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


@dataclass(frozen=True, slots=True)
class HubUri:
    repository: str
    revision: str

    def hosts(self, access: NetworkAccess, _: object) -> list[str]:
        host = urlsplit(access.hub_endpoint).hostname
        return [host] if host else []

    def open(self, opening: Opening) -> OpenSource:
        # The hub's library reads these variables at import: it may use only our client, and only the order's folder.
        os.environ |= {
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": str(max(1, round(opening.order.stall_seconds))),
            "HF_HOME": str(Path(opening.order.into) / ".cache"),
        }
        from motet_runner.sources.hub_repository import HubRepository

        return HubRepository(self.repository, self.revision, opening)


def parse(uri: str, revision: str) -> HubUri:
    repository = uri.removeprefix("hf://").rstrip("/")
    if not _REPOSITORY.fullmatch(repository) or ".." in repository:
        raise AdapterFetchFailed(f"{uri} is not a repository. Write hf://org/name.")
    if revision and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise AdapterFetchFailed(f"source.revision {revision!r} is not a branch, tag or commit. Correct it.")
    return HubUri(repository, revision or "main")
