"""What shall be done about adapters. Each numbered effect gets exactly one answer with its number, also when the disk
hangs: whoever carries it out waits for a limited time."""

from dataclasses import dataclass

from motet.domain import Digest
from motet.runner_info import Failure
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.policy.values import FetchRequest, Held

# ---------------------------------------------------------------------------------------------------- with an answer


@dataclass(frozen=True, slots=True)
class Find:
    """Take a lease of the digest's cached folder, if there is one that this request may use (None: anyone's)."""

    number: int
    digest: Digest
    request: FetchRequest | None = None


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring the files from their source into the disk cache, and take a lease of them."""

    number: int
    request: FetchRequest
    before: Held | None = None
    """What a fetch of this folder found a moment ago. If nothing has changed there since, nothing is copied."""


@dataclass(frozen=True, slots=True)
class Check:
    """Check the files against the base model."""

    number: int
    held: Held


@dataclass(frozen=True, slots=True)
class Evict:
    """Remove a folder from the disk cache unless another process uses it. A lease that comes along is
    consumed, or comes back with the answer `FolderHeld`. If this fails, it is as it was. If it takes too long, the
    folder counts as gone."""

    number: int
    digest: Digest
    held: Held | None = None


@dataclass(frozen=True, slots=True)
class ListCache:
    number: int


# ------------------------------------------------------------------------------------------------- without an answer


@dataclass(frozen=True, slots=True)
class Touch:
    """Record that a folder was used just now, and say so if it has vanished."""

    held: Held


@dataclass(frozen=True, slots=True)
class Confirm:
    """Say so if a held folder has vanished."""

    held: Held


@dataclass(frozen=True, slots=True)
class Release:
    held: Held


@dataclass(frozen=True, slots=True)
class ForgetPartial:
    """Nobody will continue this fetch: remove what it has left on the disk."""

    request: FetchRequest


@dataclass(frozen=True, slots=True)
class Load:
    """Tell the engine to load it."""

    digest: Digest
    layout: AdapterLayout


@dataclass(frozen=True, slots=True)
class Unload:
    digest: Digest


@dataclass(frozen=True, slots=True)
class AnswerOrder:
    order: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class FailOrder:
    order: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    waiter: int


@dataclass(frozen=True, slots=True)
class FailRequest:
    waiter: int
    failure: Failure


Effect = (
    Find
    | Fetch
    | Check
    | Evict
    | ListCache
    | Touch
    | Confirm
    | Release
    | ForgetPartial
    | Load
    | Unload
    | AnswerOrder
    | FailOrder
    | AnswerRequest
    | FailRequest
)
