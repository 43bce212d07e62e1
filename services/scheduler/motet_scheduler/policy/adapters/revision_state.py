"""What is known of one revision of an adapter: whether it may serve, which runner was asked, and which have refused it.

A runner that is asked certifies the revision, refuses it (what it computes is wrong there), or fails to check it. A
refusal may be the runner's own fault, so each other runner that can be asked is asked before the revision is refused.
One that certifies it and proves nothing (UNPROVED) says nothing against a refusal. One that cannot get its bytes from
their source (`lacked`) says nothing about it, if its digest is known: others may have them in their disk caches, and it
has failed once none has. If the source may answer later, these are asked again then, also when others have refused it.

              CERTIFIED   UNPROVED  REFUSED   FAILED    NOBODY_LEFT
    WANTED    PROVED      WANTED    WANTED    FAILED    REFUSED
    PROVED    PROVED      PROVED    DOUBTED   PROVED    REFUSED
    DOUBTED   PROVED      DOUBTED   DOUBTED   DOUBTED   REFUSED
    REFUSED   PROVED      REFUSED   REFUSED   FAILED    REFUSED
    FAILED    PROVED      WANTED    WANTED    FAILED    FAILED

PROVED and DOUBTED serve. All but PROVED may be asked of a runner. Pure: `adapter_checks` knows which runners are there,
and says when nobody is left to ask.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple, Self

from motet.domain import InstanceName
from motet.errors import PROOF_FAILED, REFERENCE_MISMATCH, AdapterFetchFailed, AdapterUnproved
from motet.runner_info import Failure

NO_SPACE = "NoSpace"
"""The reason of a failure: a runner's disk is full."""

LACKED_BY_ALL = "No runner has these files in its disk cache."
LACKED_BY_MANY = "{} runners were asked and do not have these files in their disk caches."

MAX_REFUSED_BY = 64
"""The number of runners of which it is remembered that they are not to be asked. Then nobody is left to ask."""

Start = tuple[InstanceName, str]
"""One start of a runner: after another one, its kernels may be others."""


class Standing(Enum):
    WANTED = auto()
    """Nobody has told yet whether it can be served."""
    PROVED = auto()
    """A runner has certified it."""
    DOUBTED = auto()
    """It serves, and since it was certified a runner has refused it."""
    REFUSED = auto()
    """All that could be asked have refused it. One that comes is asked, too."""
    FAILED = auto()
    """It could not be checked, or fits nowhere."""


class Finding(Enum):
    CERTIFIED = auto()
    """And proved, or nobody has refused it"""
    UNPROVED = auto()
    REFUSED = auto()
    FAILED = auto()
    NOBODY_LEFT = auto()


_OF_EACH = (Finding.CERTIFIED, Finding.UNPROVED, Finding.REFUSED, Finding.FAILED, Finding.NOBODY_LEFT)

TABLE: dict[Standing, dict[Finding, Standing]] = {
    before: dict(zip(_OF_EACH, after, strict=True))
    for before, *after in (
        (Standing.WANTED, Standing.PROVED, Standing.WANTED, Standing.WANTED, Standing.FAILED, Standing.REFUSED),
        (Standing.PROVED, Standing.PROVED, Standing.PROVED, Standing.DOUBTED, Standing.PROVED, Standing.REFUSED),
        (Standing.DOUBTED, Standing.PROVED, Standing.DOUBTED, Standing.DOUBTED, Standing.DOUBTED, Standing.REFUSED),
        (Standing.REFUSED, Standing.PROVED, Standing.REFUSED, Standing.REFUSED, Standing.FAILED, Standing.REFUSED),
        (Standing.FAILED, Standing.PROVED, Standing.WANTED, Standing.WANTED, Standing.FAILED, Standing.FAILED),
    )
}

SERVE = frozenset({Standing.PROVED, Standing.DOUBTED})
ENDED = frozenset({Standing.REFUSED, Standing.FAILED})


class Asked(NamedTuple):
    """This runner is fetching and checking the revision."""

    order: int
    runner: Start
    since: float
    """When it was asked, or has told last that it is at work, and was believed"""
    moved: float
    """When it was asked, or has got more bytes last"""
    heard: float
    """When it was asked, or has told last that it is at work"""
    fetched: int = 0
    """Bytes"""
    cached_only: bool = False
    """It was asked for what it has in its disk cache: its answer says nothing about the source."""


class Refusal(NamedTuple):
    runner: Start
    failure: Failure


@dataclass(frozen=True, slots=True)
class RevisionState:
    standing: Standing = Standing.WANTED
    asked: Asked | None = None
    refusals: tuple[Refusal, ...] = ()
    """One for each runner that has refused it"""
    unable: tuple[Start, ...] = ()
    """Runners that could not check what serves, for good, or that prove nothing where others have refused it. That says
    nothing about the revision."""
    silent: tuple[Asked, ...] = ()
    """What was asked and not answered, one for each runner: others are asked first. A late answer counts."""
    source_failure: Failure | None = None
    """Why its bytes did not come from their source. As long as it is set, only disk caches are asked."""
    source_order: int = 0
    """The order with which the source was asked last and failed"""
    without_it: tuple[Start, ...] = ()
    """Runners that do not have its bytes: their caches are not asked again, also if the source fails once more."""
    failure: Failure | None = None
    """Why it is refused or has failed, also while it is asked again"""
    retry_at: float | None = None
    """When it may be asked again, after a failure that may pass"""

    @property
    def serves(self) -> bool:
        return self.standing in SERVE

    @property
    def ended(self) -> bool:
        """It does not serve, for the reason in `failure`."""
        return self.standing in ENDED

    # ------------------------------------------------------------------------------------------------- whom to ask

    def may_be_asked(self, now: float) -> bool:
        """Of a runner for which it `is_open`"""
        if self.asked is not None or self.standing is Standing.PROVED:
            return False
        if self.standing is Standing.FAILED and self.retry_at is None and self.source_failure is None:
            return False
        return self.retry_at is None or now >= self.retry_at

    def is_open(self, start: Start) -> bool:
        """Whether this runner may still answer."""
        without_it = self.without_it if self.source_failure is not None else ()
        if len(self.refusals) + len(self.unable) + len(without_it) >= MAX_REFUSED_BY:
            return False
        return start not in without_it and start not in self.unable and not self.is_refused_by(start)

    def is_awaited(self, start: Start) -> bool:
        """Whether it does not end before this runner has answered. One that was asked for its cache and is silent keeps
        nobody from the source."""
        return self.is_open(start) and not any(
            one.runner == start and one.cached_only and one.order > self.source_order for one in self.silent
        )

    def is_refused_by(self, start: Start) -> bool:
        return self.refusal_of(start) is not None

    def refusal_of(self, start: Start) -> Refusal | None:
        return next((one for one in self.refusals if one.runner == start), None)

    # -------------------------------------------------------------------------------------------- what has happened

    def ask(self, order: int, start: Start, now: float) -> Self:
        cached_only = self.source_failure is not None
        return replace(self, asked=Asked(order, start, now, now, now, cached_only=cached_only))

    def works(self, check: Asked, now: float, fetched: int, patience: float) -> Self:
        """The runner that was asked is at work, so it says; it says so by a timer. If it has got no more bytes for as
        long as the `patience`, others are asked all the same."""
        told = check._replace(heard=now)
        if fetched > check.fetched:
            told = told._replace(moved=now, fetched=fetched)
        if self.asked in (None, check) and now < told.moved + patience:
            return replace(self, asked=told._replace(since=now), silent=self._silent_without(check.runner))
        silent = tuple(told if one == check else one for one in self.silent)
        return replace(self, asked=told if self.asked == check else self.asked, silent=silent)

    def unanswered(self) -> Self:
        """The runner that was asked has gone."""
        return replace(self, asked=None)

    def overdue(self) -> Self:
        """The runner that was asked has told nothing for long."""
        if self.asked is None:
            return self
        silent = (*self._silent_without(self.asked.runner), self.asked)
        return replace(self, asked=None, silent=silent[-MAX_REFUSED_BY:])

    def certified(self, start: Start) -> Self:
        refusals = tuple(one for one in self.refusals if one.runner != start)
        return type(self)(TABLE[self.standing][Finding.CERTIFIED], refusals=refusals)

    def unproved(self, start: Start) -> Self:
        """The runner that was asked proves nothing, and others have refused it."""
        standing = TABLE[self.standing][Finding.UNPROVED]
        return replace(
            self,
            standing=standing,
            asked=self._asked_of_another(start),
            unable=(*self.unable, start)[-MAX_REFUSED_BY:],
            silent=self._silent_without(start),
            failure=self.failure if standing is Standing.REFUSED else None,
            retry_at=None,
        )

    def refused(self, start: Start, failure: Failure) -> Self:
        """What this runner computes is wrong. It was asked, or has found it by itself."""
        refusals = (*(one for one in self.refusals if one.runner != start), Refusal(start, failure))
        return replace(
            self,
            standing=TABLE[self.standing][Finding.REFUSED],
            asked=self._asked_of_another(start),
            refusals=refusals[-MAX_REFUSED_BY:],
            silent=self._silent_without(start),
            failure=failure if self.standing is Standing.REFUSED else None,
            retry_at=None,
        )

    def failed(self, start: Start, failure: Failure, now: float) -> Self:
        """The runner that was asked could not check it."""
        standing, passes = TABLE[self.standing][Finding.FAILED], failure.retry_after > 0
        return replace(
            self,
            standing=standing,
            asked=self._asked_of_another(start),
            silent=self._silent_without(start),
            unable=self.unable if passes or standing not in SERVE else (*self.unable, start)[-MAX_REFUSED_BY:],
            source_failure=None,
            failure=None if standing in SERVE else failure,
            retry_at=now + failure.retry_after if passes else None,
        )

    def lacked(self, check: Asked, failure: Failure, now: float) -> Self:
        """The runner that was asked cannot get its bytes. The others are asked at once."""
        start, told = check.runner, self
        if not check.cached_only:
            retry_at = now if self.standing is Standing.FAILED else self.retry_at
            told = replace(self, source_failure=failure, source_order=check.order, retry_at=retry_at)
        return replace(
            told,
            asked=self._asked_of_another(start),
            without_it=(*(one for one in self.without_it if one != start), start)[-MAX_REFUSED_BY:],
            silent=self._silent_without(start),
        )

    @property
    def is_lacked(self) -> bool:
        """Whether it fails once nobody is left to ask. A runner that comes later may have its bytes all the same."""
        may_fail = self.standing is Standing.WANTED or self.retry_at is not None
        return self.source_failure is not None and not self.refusals and may_fail

    def lacked_by_all(self, now: float) -> Self:
        """Nobody is left to ask, and it `is_lacked`."""
        failure = self.source_failure
        assert failure is not None
        asked = len(self.without_it)
        lacked = LACKED_BY_ALL if asked < MAX_REFUSED_BY else LACKED_BY_MANY.format(asked)
        told = replace(failure, message=f"{failure.message.rstrip('.')}. {lacked}")
        return replace(self.source_asked_again(now), standing=Standing.FAILED, failure=told)

    @property
    def is_refused(self) -> bool:
        """Whether it is refused once nobody is left to ask."""
        source = self.source_failure
        again = self.standing is Standing.REFUSED and source is not None and source.retry_after > 0
        return bool(self.refusals) and (self.standing is Standing.WANTED or again)

    def refused_by_all(self, now: float) -> Self:
        """Nobody is left to ask, and it `is_refused`. Those that could not get its bytes may, if that passes."""
        return replace(self.nobody_left(), source_failure=self.source_failure).source_asked_again(now)

    def source_asked_again(self, now: float) -> Self:
        """When the failure of its source passes, if it does."""
        failure = self.source_failure
        if failure is None or failure.retry_after <= 0:
            return replace(self, retry_at=None)
        return replace(self, source_failure=None, retry_at=now + failure.retry_after)

    def nobody_left(self) -> Self:
        """All that could be asked have refused it. If none has, nobody has told anything."""
        standing = TABLE[self.standing][Finding.NOBODY_LEFT]
        if not self.refusals or standing is not Standing.REFUSED:
            return self
        return replace(self, standing=standing, source_failure=None, failure=self.refusals[-1].failure, retry_at=None)

    def without(self, start: Start) -> Self:
        """This start of a runner is over. If none is left that has refused it, those that prove nothing are asked
        again."""
        refusals = tuple(one for one in self.refusals if one.runner != start)
        return replace(
            self,
            refusals=refusals,
            unable=tuple(one for one in self.unable if one != start) if refusals else (),
            without_it=tuple(one for one in self.without_it if one != start),
            silent=self._silent_without(start),
        )

    @property
    def names_runners(self) -> bool:
        """Whether `without` one of these, it would be another."""
        return bool(self.refusals or self.unable or self.silent or self.without_it)

    def wanted_anew(self) -> Self:
        """Under another bound, or after another revision. What is under way is still answered."""
        return self if self.serves else type(self)(asked=self.asked)

    def _silent_without(self, start: Start) -> tuple[Asked, ...]:
        return tuple(one for one in self.silent if one.runner != start)

    def _asked_of_another(self, start: Start) -> Asked | None:
        return None if self.asked is not None and self.asked.runner == start else self.asked


def is_wrong(failure: Failure) -> bool:
    """True if a runner's results were wrong: its kernels or its device may be the cause."""
    return failure.code == AdapterUnproved.mapping.code and failure.reason == PROOF_FAILED


def is_refusal(failure: Failure, *, serves: bool) -> bool:
    """Whether others are asked. That an adapter moves nothing is its own fault, if nobody has proved the contrary."""
    if is_wrong(failure) or failure.reason == REFERENCE_MISMATCH:
        return True
    return serves and failure.code == AdapterUnproved.mapping.code


def may_be_elsewhere(failure: Failure) -> bool:
    """Whether a runner cannot get the bytes from their source, and another one may have them. A full disk says nothing
    about the source."""
    return failure.code == AdapterFetchFailed.mapping.code and failure.reason != NO_SPACE
