"""Folders on the web."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from motet.errors import AdapterFetchFailed
from motet_runner.sources.remote_source import Opening, OpenSource


@dataclass(frozen=True, slots=True)
class WebUri:
    url: str
    """The URL of a folder: it ends with a slash."""

    def hosts(self, *_: object) -> tuple[()]:
        return ()

    def open(self, opening: Opening) -> OpenSource:
        from motet_runner.sources.web_folder import WebFolder

        return WebFolder(self.url, opening.client, opening.secret.header, opening.need, opening.pause)


def parse(uri: str, _: str) -> WebUri:
    parts = urlsplit(uri)
    if not parts.hostname or not parts.path.endswith("/") or parts.query or parts.fragment:
        raise AdapterFetchFailed(
            f"https://{parts.hostname or ''}… must be the URL of a folder that has the files. It must end with a slash "
            "and have no ? or #."
        )
    return WebUri(uri)
