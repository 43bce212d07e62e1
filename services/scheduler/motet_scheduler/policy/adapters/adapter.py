"""One adapter: the revision that its manifest asks for, the one that serves, and what is known of both."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from motet.domain import Digest, InstanceName
from motet.errors import ModelNotFound
from motet.runner_info import Failure
from motet_scheduler.policy.adapters.revision_state import Asked, RevisionState, Standing
from motet_scheduler.policy.effects import EnsureAdapter, ReportAdapter
from motet_scheduler.policy.values import AdapterRef, AdapterSpec, AdapterStage, Certificate, GroupName, RevisionKey

REVISION_REPLACED = ModelNotFound(
    "This revision of the adapter is no longer served. Send the request again to use the current revision."
)
NEW = RevisionState()

Line = tuple[GroupName, str]
"""A namespace's adapters in a group, which wait for checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A certified revision."""

    key: RevisionKey
    digest: Digest
    certificate: Certificate | None = None
    bytes: int = 0

    @property
    def rank(self) -> int:
        return self.certificate.rank if self.certificate is not None else 0

    @property
    def template_digest(self) -> str:
        return self.certificate.template_digest if self.certificate is not None else ""

    @property
    def device_rank(self) -> int:
        return (self.certificate.device_rank if self.certificate is not None else 0) or self.rank


@dataclass(frozen=True, slots=True)
class DigestSource:
    """Where the bytes of a digest came from, for runners that do not have them."""

    ref: AdapterRef
    key: RevisionKey
    bytes: int = 0
    max_bytes: int = 0
    rank: int = 0
    """What counts in device memory"""

    def ensure(
        self,
        order: int,
        instance: InstanceName,
        digest: str,
        stage: AdapterStage,
        *,
        proved_builds: tuple[str, ...] = (),
        cached_only: bool = False,
    ) -> EnsureAdapter:
        """`digest`: the one that the bytes must have; empty: any"""
        return EnsureAdapter(
            order=order,
            instance=instance,
            ref=self.ref,
            source=self.key.source,
            source_revision=self.key.source_revision,
            credentials=self.key.credentials,
            volume=self.key.volume,
            folder=self.key.folder,
            requires_record=self.key.requires_record,
            refuses_mismatch=self.key.refuses_mismatch,
            max_bytes=self.max_bytes,
            expected_digest=digest,
            stage=stage,
            proved_builds=proved_builds,
            cached_only=cached_only,
        )


@dataclass(slots=True)
class Adapter:
    spec: AdapterSpec
    wanted: RevisionKey
    """The revision of `spec`, for the base model that its group has now."""
    serving: Revision | None = None
    states: dict[RevisionKey, RevisionState] = field(default_factory=dict)
    """Of the wanted revision and of the one that serves, and of one that was wanted and that a runner still checks"""
    asked_at: float = -math.inf
    """When a runner was last asked to check it."""
    checked_at: float = -math.inf
    """When a runner last answered a check."""
    had: dict[Digest, tuple[InstanceName, ...]] = field(default_factory=dict)
    """Which runners had its earlier revisions when they were replaced: they may still have the bytes."""
    recheck_requested: bool = False
    """A runner was asked to check the wanted revision. Asking again is not a new change."""
    last_report: ReportAdapter | None = field(default=None)
    line: Line = field(init=False)
    """Of `spec`"""

    def __post_init__(self) -> None:
        self.declare(self.spec)
        if self.serving is not None:
            self.states[self.serving.key] = RevisionState(Standing.PROVED)

    def declare(self, spec: AdapterSpec) -> None:
        self.spec, self.line = spec, (spec.group, spec.ref.namespace)

    def state_of(self, key: RevisionKey) -> RevisionState:
        return self.states.get(key, NEW) if self.states else NEW  # of ten thousand that wait, no key is hashed

    def put(self, key: RevisionKey, state: RevisionState) -> None:
        if state is not NEW and (state.asked is not None or self.needs(key)):
            self.states[key] = state
        else:
            self.states.pop(key, None)

    def needs(self, key: RevisionKey) -> bool:
        return key == self.wanted or (self.serving is not None and key == self.serving.key)

    def source_of(self, revision: Revision) -> DigestSource:
        return DigestSource(self.spec.ref, revision.key, revision.bytes, self.spec.max_bytes, revision.device_rank)

    @property
    def newest(self) -> RevisionState:
        return self.state_of(self.wanted)

    @property
    def asked_for(self) -> RevisionKey | None:
        """The revision that a runner is asked to check: one at a time"""
        if not self.states:  # mostly, if many wait
            return None
        return next((key for key, state in self.states.items() if state.asked is not None), None)

    @property
    def check(self) -> Asked | None:
        key = self.asked_for
        return self.states[key].asked if key is not None else None

    def orders(self) -> Iterator[tuple[RevisionKey, Asked]]:
        """Those whose answers count, the newest of a revision first"""
        for key, state in self.states.items():
            for check in (state.asked, *reversed(state.silent)):
                if check is not None:
                    yield key, check

    @property
    def failure(self) -> Failure | None:
        """Of the newest revision, if it failed."""
        return self.newest.failure

    @property
    def undecided(self) -> bool:
        """Nobody has told yet whether it can be served."""
        return self.serving is None and not self.newest.ended

    @property
    def resolved(self) -> bool:
        """Nothing is left to do about it, whoever comes or goes."""
        serves = self.serving is not None and self.serving.key == self.wanted
        return serves and self.newest.standing is Standing.PROVED and not self.newest.refusals

    @property
    def is_decided(self) -> bool:
        """Nobody has to look at it until something changes."""
        return bool(self.states) and self.resolved and self.check is None

    @property
    def over(self) -> bool:
        """The newest revision does not serve, and of what serves nothing is in doubt. It waits for a runner that comes,
        or for the time of another attempt."""
        newest, serving = self.newest, self.serving
        if not newest.ended or newest.silent or self.asked_for is not None:
            return False
        if serving is None:
            return True
        state = self.state_of(serving.key)
        return state.standing is Standing.PROVED and not state.refusals

    def to_ask(self, now: float) -> Iterator[RevisionKey]:
        """What a runner may be asked to check now. As long as the newest revision is not decided, what serves may be
        replaced soon, and is not asked for."""
        if self.asked_for is not None:
            return
        if self.newest.may_be_asked(now):
            yield self.wanted
        serving = self.serving.key if self.serving is not None else self.wanted
        if serving != self.wanted and self.newest.ended and self.state_of(serving).may_be_asked(now):
            yield serving
