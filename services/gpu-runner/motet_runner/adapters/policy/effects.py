"""The effects on adapters, and their answers."""

from dataclasses import dataclass
from math import inf

from motet.domain import Digest
from motet.runner_info import Failure
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.policy.values import CacheContents, FetchRequest, Held
from motet_runner.engine_messages import DropAdapter, LoadAdapter, WriteSlab

# ---------------------------------------------------------------------------------------------------- with an answer


@dataclass(frozen=True, slots=True)
class Find:
    """Take a lease of the digest's cached folder; with a `request`, only if this request may use the folder. The answer
    None: there is no such folder."""

    number: int
    digest: Digest
    request: FetchRequest | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the files from their source into the disk cache, and take a lease of them."""

    number: int
    request: FetchRequest
    before: Held | None = None
    """The result of a recent fetch of this source. If the source has not changed since, nothing is copied."""
    awaited: bool = False
    """A request waits for it, or was announced, when the fetch begins."""


@dataclass(frozen=True, slots=True)
class Check:
    """Check the files against the base model."""

    number: int
    held: Held


@dataclass(frozen=True, slots=True)
class Evict:
    """Remove a folder from the disk cache unless another process uses it. The answer None: the folder is removed, or
    the call took too long; its lease has ended. `Held`: the folder and its lease stay. `Failure`: nothing has
    changed."""

    number: int
    digest: Digest
    held: Held | None = None


@dataclass(frozen=True, slots=True)
class ListCache:
    """List the cached adapters, the least recently used first. If there are no more than `capacity`, and they have no
    more bytes than `room`, list none. Before that, `clear` bytes of slabs and of interrupted fetches are removed.
    `changed`: the adapters that have got slabs since the last listing."""

    number: int
    capacity: int
    room: float = inf
    clear: int = 0
    changed: frozenset[Digest] = frozenset()
    for_others: bool = False
    """For room that other runners of the cache wish for"""


Answer = Held | Certification | CacheContents | Failure | None
"""The answer to a numbered effect. Each effect gets exactly one answer with its number. If the disk hangs, the answer
comes at a time limit."""

# ------------------------------------------------------------------------------------------------- without an answer


@dataclass(frozen=True, slots=True)
class Confirm:
    """Record that a held folder was used just now. Report if it has vanished, which means: removed, or replaced by
    another folder."""

    held: Held


@dataclass(frozen=True, slots=True)
class ConfirmAll:
    """Report which of these held folders have vanished. `AdapterPolicy.confirmed` takes the answer; if the disk fails
    or hangs, none have."""

    held: tuple[Held, ...]


@dataclass(frozen=True, slots=True)
class Release:
    held: Held


@dataclass(frozen=True, slots=True)
class ForgetPartial:
    """Remove the files of a fetch that will not be continued."""

    request: FetchRequest


@dataclass(frozen=True, slots=True)
class GrantRoom:
    """A running fetch may write the bytes that it has asked room for."""

    fetch: int


@dataclass(frozen=True, slots=True)
class RefuseRoom:
    """A running fetch gets no room, and ends."""

    fetch: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class WishRoom:
    """Ask the other runners of the cache for room: they keep what they may not use."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Succeed:
    """An order, or a request that waits, gets its adapter."""

    who: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Fail:
    who: int
    failure: Failure


Effect = (
    Find
    | Fetch
    | Check
    | Evict
    | ListCache
    | Confirm
    | ConfirmAll
    | Release
    | ForgetPartial
    | GrantRoom
    | RefuseRoom
    | WishRoom
    | LoadAdapter
    | DropAdapter
    | WriteSlab
    | Succeed
    | Fail
)
