"""Who leads in a cluster: of several candidates, the one that holds a Lease. For one machine see `leadership`.

No process compares its clock with that of another one. The leader measures the time since it sent its last successful
renewal, the standbys the time since they last saw the Lease change, each with its own monotonic clock. The leader is
sure to be the only one (`is_leader_for_sure`) for `renew_seconds` after that renewal. The standbys wait `seconds`,
which is longer.

While the API server cannot be reached, no standby can win, and the service must continue. So the leader keeps leading,
but is no longer sure. It ends itself when it learns of another leader, or finds that it was paused for too long.
So there may be two leaders for some time: one that can reach the API server, and one that cannot. Therefore every order
has the term, which is higher for each new leader, and a new leader tells its predecessor, if it can reach it.

A term is in the Lease before any other process learns it, both when a leader wins and when it raises its term
(`raise_term_above`). So two leaders never act under the same term. The Lease names the last of `TERMS_AT_A_TIME` terms,
which its holder has reserved: so a leader can raise its term a few times while it cannot write the Lease. After that it
keeps its term.
"""

import asyncio
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Protocol, Self

import structlog

from motet.errors import SetupError
from motet.kube import CONFLICT, FORBIDDEN, NOT_FOUND, KubeObject, StatusError, Unreachable
from motet.settings import LeaseSettings
from motet.surroundings import Surroundings, WallClock
from motet.terms import is_term
from motet.watchdog import Watchdog

log = structlog.get_logger(__name__)

TERM = "motet.dev/term"
ADDRESS = "motet.dev/address"

TERMS_AT_A_TIME = 16
"""How many terms a write of the Lease reserves, the present one included. Each renewal fills them up."""

RELEASE_SECONDS = 2.0
MIN_REQUEST_SECONDS = 1.0
LOST_LEADERSHIP = 1
"""Exit status: start this process again, as a candidate."""


class LeaseApi(Protocol):
    """What an election needs from the API server: get, create and update one Lease."""

    async def get(self, path: str, *, seconds: float) -> KubeObject: ...
    async def post(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject: ...
    async def put(self, path: str, body: KubeObject, *, seconds: float) -> KubeObject: ...


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The contents of a Lease."""

    holder: str
    seconds: float
    renewed: str
    transitions: int
    term: int
    """The last term that any leader may have used."""
    address: str

    @classmethod
    def of(cls, lease: KubeObject, wall: WallClock) -> Self:
        spec, annotations = lease.get("spec") or {}, lease["metadata"].get("annotations") or {}
        transitions, term = int(spec.get("leaseTransitions") or 0), annotations.get(TERM, "0")
        return cls(
            holder=spec.get("holderIdentity") or "",
            seconds=float(spec.get("leaseDurationSeconds") or 0),
            renewed=spec.get("renewTime") or "",
            transitions=transitions,
            # The annotation is damaged. The time is higher than any term that elections alone can have reached.
            term=max(transitions, int(term) if is_term(term) else int(wall())),
            address=annotations.get(ADDRESS, ""),
        )


def end_process(why: str) -> None:
    """End this process at once: it no longer leads and must not act."""
    try:
        log.critical("leadership_lost", reason=why)
        sys.stderr.flush()
    finally:  # also when the log cannot be written
        os._exit(LOST_LEADERSHIP)


class Election:
    """A context manager: inside it, this process is a standby, and leads when it gets the Lease. It leads until the
    context ends or another process leads.

    Entering raises SetupError if the API server forbids what an election needs. Leaving releases the Lease, so that
    the next leader need not wait. `term` and `raise_term_above` have a meaning only while this process leads.
    """

    def __init__(
        self,
        api: LeaseApi,
        settings: LeaseSettings,
        *,
        address: str = "",
        time_scale: float = 1.0,
        surroundings: Surroundings,
        lost: Callable[[str], None] = end_process,
    ) -> None:
        self.identity = f"{settings.pod_name or os.uname().nodename}-{surroundings.new_id(4)}"
        """New at every start, so that a restarted process is not mistaken for its predecessor."""
        self.term = 0
        self._api = api
        self._name, self._namespace = settings.name, settings.namespace
        self._address = address
        self._lease_seconds = settings.seconds * time_scale
        self._renew_seconds = settings.renew_seconds * time_scale
        self._retry_seconds = settings.retry_seconds * time_scale
        self._around = surroundings
        self._clock = surroundings.clock
        self._lost = lost
        self.reserved = 0
        """The last term that is ours by the Lease."""
        self._wanted = 0
        """The term that we need: one above the highest term that a peer has seen."""
        self._waiting: dict[Callable[[], object], int] = {}
        """Functions to call when the term is higher than the given one."""
        self.predecessor = ""
        """The address of the last leader, if it did not release the Lease."""
        self._seen: LeaseRecord | None = None
        self._seen_at = 0.0
        self._api_unreachable = False
        self._lease: KubeObject | None = None
        self._sure_until = 0.0
        self._leads = asyncio.Event()
        self._next_step_now = asyncio.Event()
        self.campaign: asyncio.Task[None] | None = None
        self._watchdog: Watchdog | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._step()
        except StatusError as error:
            if error.status != FORBIDDEN:
                raise SetupError(f"the Lease {self._namespace}/{self._name}: {error}") from None
            raise SetupError(
                f"{error}. Grant this ServiceAccount get, create and update on leases of coordination.k8s.io in the "
                f"namespace {self._namespace}."
            ) from None
        self.campaign = asyncio.create_task(self._run(), name="election")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.campaign is not None:
            self.campaign.cancel()
            await asyncio.gather(self.campaign, return_exceptions=True)
        if self._leads.is_set():
            await self._release()
            self._leads.clear()
        if self._watchdog is not None:
            self._watchdog.stop()

    @property
    def leads(self) -> bool:
        return self._leads.is_set()

    @property
    def is_leader_for_sure(self) -> bool:
        """Whether it leads and no other process can lead yet. Check it before each action that has no term."""
        return self._leads.is_set() and self._clock() < self._sure_until

    @property
    def leader_address(self) -> str:
        """The last known address of the leader. Empty: there is no leader, or it is not known."""
        return self._seen.address if self._seen is not None and self._seen.holder else ""

    async def wait_until_leader(self) -> None:
        """Wait until this candidate leads."""
        await self._leads.wait()

    def raise_term_above(self, term: int, then: Callable[[], object]) -> None:
        """Make the term higher than `term`, which a peer has seen, and call `then` when it is.

        That is at once if the Lease has the higher term reserved. Otherwise the leader writes the Lease now, and tries
        again while the API server cannot be reached.
        """
        self.step_down_for(term)
        self._waiting[then] = max(term, self._waiting.get(then, term))
        self._wanted = max(self._wanted, term + 1)
        if term < self.reserved:
            self._raise_to(max(self.term, term + 1))
        else:
            self._next_step_now.set()

    def _raise_to(self, term: int) -> None:
        self.term = term
        for then in [then for then, seen in self._waiting.items() if seen < term]:
            del self._waiting[then]
            asyncio.get_running_loop().call_soon(then)  # an error in it must not stop the election

    def step_down_for(self, term: int) -> None:
        """A peer says that another process leads in this term. Ignored while this process is sure that it leads."""
        if self._leads.is_set() and not self.is_leader_for_sure and term > self.term:
            self._lost(f"another process leads, in term {term}; our term was {self.term}")

    # ---------------------------------------------------------------------------------------------------------- course

    async def _run(self) -> None:
        while True:
            try:
                wait = await self._step()
            except StatusError as error:
                log.warning("lease_request_refused", lease=self._name, reason=str(error))
                self._continue_leading()
                wait = self._retry_seconds
            except Exception:
                # For example, a kubeconfig that cannot be read now.
                log.exception("lease_step_failed", lease=self._name)
                self._lease = None  # the next step reads it again
                self._continue_leading()
                wait = self._retry_seconds
            try:
                async with asyncio.timeout(wait):
                    await self._next_step_now.wait()
                self._next_step_now.clear()
            except TimeoutError:
                pass

    async def _step(self) -> float:
        """Read the Lease once, or renew it once. Returns the seconds until the next step."""
        sent_at = self._clock()
        try:
            if self._leads.is_set():
                await self._renew(sent_at)
                return max(0.0, sent_at + self._retry_seconds - self._clock())
            return await self._read_or_acquire(sent_at)
        except Unreachable as error:
            if not self._api_unreachable:
                log.warning("lease_api_unreachable", lease=self._name, leads=self._leads.is_set(), reason=str(error))
            self._api_unreachable = True
            self._continue_leading()
            # A request that timed out has already taken most of this time.
            return max(self._retry_seconds / 4, sent_at + self._retry_seconds - self._clock())

    def _continue_leading(self) -> None:
        """Go on leading, since no other leader is known. But not if the time ended while this process was paused."""
        if self._watchdog is not None and self._watchdog.in_time:
            self._watchdog.until(self._clock() + self._renew_seconds)

    async def _read_or_acquire(self, sent_at: float) -> float:
        """Read the Lease, and take it if it is free. Returns the seconds until the next step."""
        lease = await self.fetch()
        record = self._record(lease) if lease is not None else LeaseRecord("", 0, "", 0, 0, "")
        lasts = record.seconds or self._lease_seconds
        if record != self._seen:
            # The Lease may have changed just after we last read it. The settings give the holder more time than that.
            self._seen, self._seen_at = record, self._clock() - self._retry_seconds / 2
        if self._api_unreachable:
            # The holder could not renew the Lease either. It tries as often as we do, so give it time to renew first.
            self._seen_at = max(self._seen_at, self._clock() + 2 * self._retry_seconds - lasts)
            self._api_unreachable = False
        # The holder may be this process: the API server carried out an earlier write whose answer was lost.
        taken = record.holder not in ("", self.identity)
        free_in = self._seen_at + lasts - self._clock()
        if taken and free_in > 0:
            pause = self._around.random.uniform(0.3, 0.5) * self._retry_seconds
            return min(pause, free_in)
        term = record.term + 1
        reserved = record.term + TERMS_AT_A_TIME
        transitions = record.transitions + 1 if lease is not None else 0
        try:
            self._lease = await self._write(self._held(lease, reserved, transitions))
        except StatusError as error:
            if error.status not in (CONFLICT, NOT_FOUND):
                raise
            return 0.0  # another candidate was faster: read at once who it is
        self.term, self.reserved = term, reserved
        self.predecessor = record.address if taken else ""
        self._seen = self._record(self._lease)
        self._sure_until = sent_at + self._renew_seconds
        self._watchdog = self._around.watchdog(self._sure_until, self._late)
        self._leads.set()
        log.info("leadership_acquired", lease=self._name, identity=self.identity, term=term, after=record.holder)
        return self._retry_seconds

    async def _renew(self, sent_at: float) -> None:
        assert self._watchdog is not None
        term = max(self.term, self._wanted)
        reserved = term + TERMS_AT_A_TIME - 1
        try:
            self._lease = await self._write(self._held(self._lease, reserved))
        except StatusError as error:
            if error.status not in (CONFLICT, NOT_FOUND):
                raise
            # Another client has changed or deleted the Lease. We may still hold it, with another resourceVersion.
            self._lease = await self.fetch()
            holder = self._record(self._lease).holder if self._lease is not None else ""
            if self._lease is not None and holder != self.identity:
                self._lost(f"the Lease {self._namespace}/{self._name} is now held by {holder or 'no process'}")
                return
            try:
                self._lease = await self._write(self._held(self._lease, reserved))
            except StatusError as again:
                raise Unreachable(f"the Lease changes too fast: {again}") from None
        if self._api_unreachable:
            log.info("lease_api_reachable", lease=self._name, term=self.term)
        self._api_unreachable = False
        self._sure_until = sent_at + self._renew_seconds
        self._watchdog.until(self._sure_until)
        self.reserved = reserved
        self._raise_to(max(self.term, term))  # it may have risen meanwhile, within what was reserved before

    async def _release(self) -> None:
        self.reserved = self.term  # the others go back
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                # A renewal that was in flight may still succeed, and change the version after we have read it.
                while (lease := await self.fetch()) is not None and self._record(lease).holder == self.identity:
                    lease["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": self._time()}
                    lease["metadata"]["annotations"] |= {TERM: str(max(self.term, self._wanted)), ADDRESS: ""}
                    with suppress(StatusError):
                        await self._write(lease)
                        log.info("lease_released", lease=self._name, term=self.term)
                        return
        except (StatusError, Unreachable, TimeoutError) as error:
            log.warning("lease_release_failed", reason=str(error), hint="The next leader waits until the Lease ends.")

    # ---------------------------------------------------------------------------------------------------------- object

    def _held(self, lease: KubeObject | None, reserved: int, transitions: int | None = None) -> KubeObject:
        """The Lease with this process as its holder. `transitions` is given when the holder changes."""
        old = lease or {"metadata": {"name": self._name, "namespace": self._namespace}, "spec": {}}
        spec = {
            **(old.get("spec") or {}),
            "holderIdentity": self.identity,
            "leaseDurationSeconds": math.ceil(self._lease_seconds),
            "renewTime": self._time(),
        }
        if transitions is not None:
            spec |= {"acquireTime": spec["renewTime"], "leaseTransitions": transitions}
        annotations = {**(old["metadata"].get("annotations") or {}), TERM: str(reserved), ADDRESS: self._address}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {**old["metadata"], "annotations": annotations},
            "spec": spec,
        }

    @property
    def _leases(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"

    @property
    def _request_seconds(self) -> float:
        return max(1.5 * self._retry_seconds, MIN_REQUEST_SECONDS)

    async def fetch(self) -> KubeObject | None:
        try:
            lease = await self._api.get(f"{self._leases}/{self._name}", seconds=self._request_seconds)
        except StatusError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        self._record_of_answer(lease)
        return lease

    async def _write(self, lease: KubeObject) -> KubeObject:
        """Create or replace the Lease. The API server refuses it if the Lease has changed since we read it.

        Raises Unreachable if the answer is not what was sent: whether it is written is not known then.
        """
        seconds = self._request_seconds
        if "resourceVersion" in lease["metadata"]:
            answer = await self._api.put(f"{self._leases}/{self._name}", lease, seconds=seconds)
        else:
            answer = await self._api.post(self._leases, lease, seconds=seconds)
        sent, written = self._record(lease), self._record_of_answer(answer)
        if written.holder != sent.holder or written.term < sent.term:
            raise Unreachable("the answer to a write has another Lease than the one that was sent")
        return answer

    def _record(self, lease: KubeObject) -> LeaseRecord:
        return LeaseRecord.of(lease, self._around.wall)

    def _record_of_answer(self, answer: KubeObject) -> LeaseRecord:
        """Raises Unreachable if it is no Lease: something on the way answers in the API server's place, such as a proxy
        that asks for a login."""
        try:
            if answer["kind"] == "Lease":
                return self._record(answer)
        except (KeyError, TypeError, ValueError, AttributeError):
            pass
        raise Unreachable(f"the answer is no Lease: {str(answer)[:200]}")

    def _time(self) -> str:
        """The time, for people who read the Lease. No program uses it."""
        now = datetime.fromtimestamp(self._around.wall(), UTC)
        return now.isoformat(timespec="microseconds").replace("+00:00", "Z")

    def _late(self) -> None:
        self._lost("the Lease could not be renewed in time")
