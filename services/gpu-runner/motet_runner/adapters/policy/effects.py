"""What shall be done about adapters, and what comes of it."""

from dataclasses import dataclass

from motet.domain import Digest
from motet.runner_info import Failure
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.policy.values import FetchRequest, Held
from motet_runner.engine_messages import DropAdapter, LoadAdapter

# ---------------------------------------------------------------------------------------------------- with an answer


@dataclass(frozen=True, slots=True)
class Find:
    """Take a lease of the digest's cached folder, if there is one that this request may use (None: anyone's). The
    answer None: there is none."""

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
    """Remove a folder from the disk cache unless another process uses it. The answer None: it has gone, and so has the
    lease that came along. `Held`: that lease, because the folder stays. If this fails, it is as it was. If it takes too
    long, the folder counts as gone."""

    number: int
    digest: Digest
    held: Held | None = None


@dataclass(frozen=True, slots=True)
class ListCache:
    """Which adapters are cached. The one that was not used for longest comes first."""

    number: int


Answer = Held | Certification | tuple[Digest, ...] | Failure | None
"""What came of a numbered effect. Each gets exactly one answer with its number, also when the disk hangs: whoever
carries it out waits for a limited time."""

# ------------------------------------------------------------------------------------------------- without an answer


@dataclass(frozen=True, slots=True)
class Confirm:
    """Say so if a held folder has vanished: somebody has removed it, or replaced it by another one."""

    held: Held
    used: bool = False
    """Also record that the folder was used just now."""


@dataclass(frozen=True, slots=True)
class Release:
    held: Held


@dataclass(frozen=True, slots=True)
class ForgetPartial:
    """Nobody will continue this fetch: remove what it has left on the disk."""

    request: FetchRequest


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
    | Release
    | ForgetPartial
    | LoadAdapter
    | DropAdapter
    | Succeed
    | Fail
)
