"""What happened to adapters. Answers name the effect that they answer."""

from dataclasses import dataclass

from motet.domain import Digest
from motet.runner_info import Failure
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.policy.values import Held, Order

# ------------------------------------------------------------------------------------------ the scheduler and requests


@dataclass(frozen=True, slots=True)
class Ordered:
    order: Order


@dataclass(frozen=True, slots=True)
class OrderCancelled:
    """Nobody waits for the answer any more. A fetch goes on, since the next order will want it."""

    order: int


@dataclass(frozen=True, slots=True)
class RequestWaits:
    waiter: int
    digest: Digest
    manifest: str
    """The adapter that its client named, as namespace/name. Empty: its gateway does not say."""


@dataclass(frozen=True, slots=True)
class RequestLeft:
    """A request waits no longer."""

    waiter: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Used:
    """A request starts, or was announced: the adapter is not evicted before `until`."""

    digest: Digest
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestEnded:
    digest: Digest


@dataclass(frozen=True, slots=True)
class Dropped:
    """The scheduler needs a digest no more. The files stay until the disk cache needs the space."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class ManifestGone:
    manifest: str


# --------------------------------------------------------------------------------------------------- answers of effects


@dataclass(frozen=True, slots=True)
class FolderHeld:
    """Answers Find, Fetch, and an Evict of a folder that another process uses."""

    number: int
    held: Held


@dataclass(frozen=True, slots=True)
class NotThere:
    """Answers Find: the digest is not in the disk cache, or not for this order. Answers Evict: it is gone."""

    number: int


@dataclass(frozen=True, slots=True)
class Checked:
    number: int
    certification: Certification


@dataclass(frozen=True, slots=True)
class Listed:
    number: int
    digests: tuple[Digest, ...]
    """All cached adapters. The one that was not used for longest comes first."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Answers any numbered effect."""

    number: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class FolderVanished:
    """A held folder is not at its place any more: somebody has removed it, or replaced it by another one."""

    held: Held


# ----------------------------------------------------------------------------------------------------------- the engine


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    digest: Digest


@dataclass(frozen=True, slots=True)
class EngineEvicted:
    digest: Digest


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine could not load it: its files may have changed."""

    digest: Digest


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Answer = FolderHeld | NotThere | Checked | Listed | Failed
Event = (
    Ordered
    | OrderCancelled
    | RequestWaits
    | RequestLeft
    | Used
    | RequestEnded
    | Dropped
    | ManifestGone
    | Answer
    | FolderVanished
    | EngineLoaded
    | EngineEvicted
    | EngineFailed
    | Tick
)
