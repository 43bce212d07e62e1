"""The interface of a network source's module: a parsed URI, which a fetch process can open."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from motet_runner.sources.fetch_order import FetchOrder, NetworkAccess
from motet_runner.sources.file_selection import WantedFile
from motet_runner.sources.network_guard import Allowed

if TYPE_CHECKING:  # only a fetch process has these
    import httpx2

    from motet_runner.sources.secret import SourceCredentials


class NeedRoom(Protocol):
    """Called with files and their bytes before they are written: waits until there is room for them."""

    def __call__(self, files: Mapping[str, int], less: Sequence[int] = ()) -> int:
        """If there is no room for all bytes of one file, it may be for as many less: the first number that can be is
        returned. 0: there is room for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a source gets from a fetch process."""

    order: FetchOrder
    secret: "SourceCredentials"
    client: "httpx2.Client"
    """A client that connects only to allowed addresses"""
    on_checked: Callable[[int], None]
    """Called with the number of bytes that were read again for a check: these count as progress, too."""
    need: NeedRoom

    @property
    def pause(self) -> float:
        """Seconds before a request is sent again."""
        return self.order.stall_seconds / 60


class OpenSource(Protocol):
    @property
    def revision(self) -> str:
        """The revision of the files; empty if the source has no revisions."""

    @property
    def sizes(self) -> Mapping[str, int | None] | None:
        """File → its size, if the source tells it. None: the source has no listing."""

    def fetch(self, file: WantedFile, into: Path) -> bool:
        """Fetch one file. False if it does not exist and is not required."""

    def confirm(self, into: Path) -> None:
        """Raises AdapterFetchFailed if one of the fetched files has changed since it came. Nothing to do for a source
        that names its files by a revision or a digest."""


class RemoteSource(Protocol):
    """A source module's `parse(uri, revision)` returns a RemoteSource, or raises AdapterFetchFailed. The service also
    calls `parse`, so `open` imports what only a fetch process needs."""

    def hosts(self, access: NetworkAccess, secret: "SourceCredentials") -> Iterable[Allowed]:
        """The hosts that the platform has named for this source. They are allowed, whatever their addresses are. A host
        that a tenant's Secret names is none of these."""

    def open(self, opening: Opening) -> OpenSource: ...
