"""Which adapters are on the device, which load, and which are evicted (PU-07).

An adapter gets a run of pages before it loads. A worker copies it into the run, a part in each iteration, and reports
when all of it has arrived. All sequences that wait for an adapter share its load. A load may take several iterations.
So others that sequences wait for begin meanwhile: few, and small ones, because what one iteration copies is bounded.
They do not wait for one whose disk does not answer. What sequences wait for begins first. Tenants take turns, however
many adapters one of them waits for; within a tenant, the oldest is first.

An adapter with live sequences stays, also if they wait to begin. Others leave for an adapter that a sequence waits for,
or for KV, as `device_budget` says: those that parked sequences need after the rest, and those that the platform wants
resident (`minReplicas`) last. The load of one that the platform wants resident also takes pages of the prefix cache and
of idle adapters that it does not want. Another load that nobody waits for takes only empty pages. Both are given up for
sequences.

Some stay in the host's memory when they leave the device: see `host_adapters`.

An adapter that was never proved serves only once it is. See `adapter_proofs` for when that is.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from motet.domain import BASE, Digest
from motet.errors import AdapterIncompatible, MotetError
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import ProofOrder
from motet_runner.interface import AdapterEvicted, AdapterLeftHost, AdapterLoaded, ProofEnded, State
from motet_runner.plan.adapter_proofs import AdapterProofs
from motet_runner.plan.device_budget import DeviceBudget, Grant, IsLive
from motet_runner.plan.host_adapters import HostAdapters
from motet_runner.plan.pages import PageAllocator
from motet_runner.plan.sequence_table import SequenceTable
from motet_runner.plan.step_plan import AdapterLoad, LoadArrived, ProofResult, ProofStep

MAX_LOADS = 4
"""How many adapters load at a time. Those whose disks do not answer do not count."""
MAX_TO_PROVE = 2
"""With this number of adapters on the device that are to be proved, no other takes somebody's place there for its
proof."""
MAX_SILENT = 16
"""With this number of the latter, no other load begins: each has a thread, and memory of the host."""
MAX_BYTES_BESIDE = 16 * 1024 * 1024
"""How many bytes the runs of all adapters that load have, if there is more than one: more would only wait for each
other's copies, in the host's memory. Those whose disks do not answer do not count."""
READ_COST = 5
"""A load from the disk takes about as long as to copy this many times its bytes from the host's memory."""
COST_OF_ANY = 2 * 1024 * 1024
"""What each load takes besides, in bytes that are copied."""


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """An adapter whose checked bytes are on this machine, see `layout`."""

    layout: AdapterLayout
    pages: int
    """How many pages its run has."""
    bytes: int
    """How many of them its load writes"""
    arrived: bool = False
    """True if all of it is on the device."""


class ResidentAdapters:
    def __init__(
        self,
        pages: PageAllocator,
        table: SequenceTable,
        *,
        max_adapters: int,
        pages_of_rank: Callable[[int], int],
        contiguous: bool = False,
        proofs: AdapterProofs | None = None,
        max_loads: int = MAX_LOADS,
        max_pages_beside: float = math.inf,
        host: HostAdapters | None = None,
        bytes_of_rank: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """`contiguous`: the pages of each sequence are a run. `max_pages_beside`: as MAX_BYTES_BESIDE says.
        `bytes_of_rank`: how many `host` takes for an adapter"""
        self.proofs = AdapterProofs() if proofs is None else proofs
        self.promises_fit: Callable[[], bool] = lambda: True
        """True if all promises fit beside the adapters in use. A proof alone breaks none: its turn waits for that."""
        self._budget = DeviceBudget(
            pages,
            max_adapters=max_adapters,
            kv_runs=lambda: [one.pages for one in table if contiguous and one.pages],
            is_awaited=table.has_users,
            load_cost=self._load_cost,
        )
        self._pages = pages
        self._table = table
        self._pages_of_rank = pages_of_rank
        self.host = HostAdapters(0) if host is None else host
        self._bytes_of_rank = bytes_of_rank
        self._known: dict[Digest, KnownAdapter] = {}
        self._wanted: dict[Digest, None] = {}
        """Adapters to load, in this order."""
        self._dropped: dict[Digest, None] = {}
        self._max_loads = max_loads
        self._max_pages_beside = max_pages_beside
        self._loading: dict[Digest, AdapterLoad] = {}
        self._silent: set[Digest] = set()
        """Those of them whose disk does not answer"""
        self._loads = 0
        """How many loads have begun."""
        self._wrong_slabs: dict[Digest, str] = {}
        """What they hold is wrong. None is read again: it stays if the disk takes no writes, or does not answer."""
        self._turns: dict[str, int] = {}
        """How many had begun after the last load for each tenant that waits, or when it came"""
        self._begun: list[AdapterLoad] = []
        self._evicted: list[Digest] = []

    def on_device_or_in(self, live: Collection[Digest]) -> Iterator[tuple[Digest, KnownAdapter]]:
        """The adapters that have pages, and those of `live` that are known."""
        for digest in {**dict.fromkeys(self._budget.adapters), **dict.fromkeys(live)}:
            if (known := self._known.get(digest)) is not None:
                yield digest, known

    # -- what there is -----------------------------------------------------------------------------------------------

    def is_here(self, digest: Digest) -> bool:
        """True if rows of this adapter can be computed."""
        return digest == BASE or (self._has_arrived(digest) and self.proofs.may_serve(digest))

    def is_known(self, digest: Digest) -> bool:
        return digest in self._known

    def pages_of(self, digest: Digest) -> int:
        """How many pages the adapter takes on the device. 0: it is not known yet."""
        known = self._known.get(digest)
        return 0 if known is None else known.pages

    def first_page_of(self, digest: Digest) -> int:
        """The first page of an adapter's run; the next iteration uses it."""
        self._budget.use(digest)
        return self._budget.run_of(digest).start

    def pages_in_use(self, *more: Digest) -> int:
        """How many pages KV cannot get because of the adapters with live sequences, and of `more`. Adapters count
        before they are loaded, but never more of them than fit on the device together."""
        sizes = sorted(map(self.pages_of, self._in_use() | {*more}), reverse=True)
        return sum(sizes[: self._budget.max_adapters])

    def reclaimable(self, *, spare: Digest | None = None) -> int:
        """How many pages of adapters KV may get instead."""
        live = self._in_use()
        return sum(run.length for one, run in self._budget.runs if one not in live and one != spare)

    def pages_to_take(self, digest: Digest) -> int:
        """How many pages the adapter does not have yet."""
        return 0 if digest in self._budget else self.pages_of(digest)

    @property
    def busy(self) -> bool:
        """True if a plan could do something for an adapter now."""
        if self._loading or self._begun or self._evicted or self._some_go:
            return True
        if self._to_prove_here or self._proves_beside_nobody:
            return True
        return any(not self._is_live(digest) or self._could_begin(digest) for digest in self._wanted)

    @property
    def still(self) -> bool:
        """True if no adapter loads, is to load, has gone, or is to be forgotten."""
        changes = self._loading or self._begun or self._evicted or self._wanted
        return not changes and not self._some_go

    @property
    def still_beside_load(self) -> bool:
        """The same, but adapters may load, of which the worker knows. Until one has arrived, no other load begins."""
        if not self._loading:
            return self.still
        if self._begun or self._evicted or self._some_go:
            return False
        return self._loads_are_full or not any(
            self._is_awaited(digest) and self._fits_beside_loads(digest) for digest in self._wanted
        )

    @property
    def loads_wait(self) -> bool:
        """True if sequences wait for adapters, and no such adapter can get its pages."""
        return not self._answering and any(map(self._is_awaited, self._wanted))

    @property
    def loads_lack_pages(self) -> bool:
        """True if sequences wait for adapters that lack only pages, not a place among the device's adapters."""
        return self.loads_wait and sum(map(self._is_live, self._budget.adapters)) < self._budget.max_adapters

    def in_the_way_of_a_proof(self) -> Digest | None:
        """The adapter with the fewest live sequences, if the turn of a proof waits only for a place on the device."""
        turn = self.proofs.turn
        if turn is None or self._loads_are_full or not self.promises_fit():
            return None
        if turn not in self._wanted or not self._fits_beside_loads(turn):
            return None
        resident = self._budget.adapters
        if len(resident) < self._budget.max_adapters or not all(map(self._is_live, resident)):
            return None
        return min(filter(self._has_arrived, resident), key=self._table.live_on, default=None)

    def refusal(self, digest: Digest) -> MotetError | None:
        """Why no request can use an adapter on this device."""
        return self.too_large(digest) or self.proofs.refusal(digest)

    def too_large(self, digest: Digest) -> AdapterIncompatible | None:
        """Why no request can ever use an adapter on this device."""
        needed, capacity = self.pages_of(digest), self._pages.capacity
        if needed < capacity:
            return None
        return AdapterIncompatible(
            f"The adapter's rank is {self._known[digest].layout.rank}. It needs {needed} pages of device memory "
            f"beside one for a request, and this runner has {capacity}. Raise the pool's engine.kvCacheMiB; where that "
            "is not set, raise engine.maxResidentAdapters.",
            reason="RankTooLarge",
        )

    # -- commands ----------------------------------------------------------------------------------------------------

    def register(
        self,
        digest: Digest,
        layout: AdapterLayout,
        *,
        pinned: bool = False,
        proof: ProofOrder | None = None,
    ) -> None:
        """The adapter's bytes are on this machine. It will load if a sequence waits for it, or if the device has fewer
        adapters than allowed, or to be proved. `pinned`: the platform wants it resident, until the next call says
        something else. It will load now if it can. `proof`: None if it may serve as it is."""
        if digest in self._dropped:
            del self._dropped[digest]
            if digest not in self._loading:
                self._drop_in_host(digest)  # the service counts what is dropped as gone from there
        known = self._known.get(digest)
        new = known is None
        if known is None:
            pages, size = self._pages_of_rank(layout.rank), self._bytes_of_rank(layout.rank)
            known = self._known[digest] = KnownAdapter(layout, pages, size)
        known.layout = layout
        self._budget.pin(digest, pinned=pinned)
        if (too_large := self.too_large(digest)) is not None:
            if proof is not None:
                self._table.events.append(ProofEnded(proof.number, digest, too_large))
            return
        self._answer(self.proofs.register(digest, proof, new=new))
        if pinned or self._is_live(digest) or len(self._budget) < self._budget.max_adapters:
            self.want(digest)

    def used(self, digest: Digest) -> None:
        """A request uses the adapter."""
        if digest != BASE:
            self.host.used(digest)
            self._budget.used(digest)

    def want(self, digest: Digest) -> None:
        """The adapter will load, once it is known and can get its pages."""
        if digest in self._known and digest not in self._budget:
            self._wanted[digest] = None

    def drop(self, digest: Digest) -> None:
        """Forget the adapter once no sequence uses it. Parked sequences count: they could not load it again."""
        if digest in self._known:
            self._dropped[digest] = None

    # -- in each plan ------------------------------------------------------------------------------------------------

    def forget_dropped(self) -> None:
        for digest in [one for one in self._dropped if self._forgettable(one)]:
            self._dropped.pop(digest, None)
            self._wanted.pop(digest, None)
            if digest in self._budget:
                self._budget.release(digest)
                self._gone(digest)
            self._budget.pin(digest, pinned=False)
            del self._known[digest]
            self._drop_in_host(digest)
            self._wrong_slabs.pop(digest, None)
            self._answer(self.proofs.forget(digest))

    def another_plan(self) -> None:
        if (turn := self.proofs.another_plan(self._budget)) is not None:
            self.want(turn)

    def leave(self, digest: Digest) -> None:
        """The adapter leaves the device, because no sequence may use it any more."""
        self._wanted.pop(digest, None)
        if digest in self._budget:
            self._budget.release(digest)
            self._gone(digest)

    def reclaim(self, count: int, *, spare: Digest | None = None) -> bool:
        """Evict adapters until `count` pages are free. False, without any change, if that does not suffice."""
        evicted = self._budget.reclaim(count, lambda one: self._stays(one, spare))
        if evicted is None:
            return False
        for digest in evicted:
            self._gone(digest)
        return True

    def lengthen(self, pages: Sequence[int], count: int, *, spare: Digest | None = None) -> Grant | None:
        """A run of `count` pages for a sequence that has the run `pages` now; see `DeviceBudget.lengthen`."""
        grant = self._budget.lengthen(pages, count, lambda one: self._stays(one, spare))
        for digest in grant.evicted if grant is not None else ():
            self._gone(digest)
        return grant

    def begin_load(self) -> Grant | None:
        """Give pages to the next adapter to load, and evict others for it. To be called until there is none."""
        if self._loads_are_full:
            return None
        alone = self._proves_beside_nobody
        if alone and (first := self.proofs.first_outside(self._budget)) is not None:
            self.want(first)
        tenants = self._tenants_waiting() if len(self._wanted) > 1 else {}
        for digest in self._in_turn(tenants):
            waits = self._is_live(digest)
            if not self._could_begin(digest) if waits else self._answering:
                continue
            if not self._fits_beside_loads(digest):
                return None  # nobody passes it, or it could wait for ever
            urgent = waits or (alone and digest in self.proofs)
            pinned = self._budget.is_pinned(digest)
            stays = self._stays_live if waits else self._is_live_or_pinned
            if urgent and not waits:
                stays = {*self._in_use(), *self._to_prove_here}.__contains__
            grant = self._budget.grant(digest, self._known[digest].pages, stays, evict=urgent or pinned)
            if grant is None:
                if not waits:
                    del self._wanted[digest]
                continue
            for evicted in grant.evicted:
                self._gone(evicted)
            del self._wanted[digest]
            self._loads += 1
            self._turns |= dict.fromkeys(tenants.get(digest, ()), self._loads)
            layout = self._known[digest].layout
            if self._has_wrong_slab(digest):
                layout = replace(layout, slab="")
            place, gone = self.host.begin(
                self._loads,
                digest,
                self._known[digest].bytes,
                awaited=self._awaited,
                pinned=self._budget.is_pinned,
            )
            for one in gone:
                self._left_host(one)
            self._loading[digest] = load = AdapterLoad(self._loads, digest, layout, place)
            self._begun.append(load)
            return grant
        return None

    def take_changes(self) -> tuple[tuple[AdapterLoad, ...], tuple[Digest, ...]]:
        """Loads that have begun, and adapters that have gone, since the last call."""
        changes = tuple(self._begun), tuple(self._evicted)
        self._begun, self._evicted = [], []
        return changes

    def loading(self) -> dict[int, int]:
        """The number of each current load → the first page of its run. What sequences wait for comes first."""
        if not self._loading:
            return {}
        loads = sorted(self._loading.values(), key=lambda load: not self._is_live(load.digest))
        return {load.number: self._budget.run_of(load.digest).start for load in loads}

    def proving(self) -> ProofStep | None:
        """The proof that goes on with the next plan. It pauses while an adapter loads that sequences wait for."""
        attempt = self.proofs.attempt(self._to_prove_here, self._has_sequences)
        if attempt is None:
            return None
        number, digest, order = attempt
        awaited = any(map(self._has_sequences, self._loading))
        paused = awaited and self.proofs.yields(digest, self._has_sequences)
        first_page = self._budget.run_of(digest).start
        return ProofStep(number, digest, self._known[digest].layout, first_page, order, paused)

    # -- what a worker says ------------------------------------------------------------------------------------------

    def arrived(self, load: LoadArrived) -> Digest | None:
        """All of an adapter is on the device. None if the load was given up meanwhile."""
        digest = self._loaded_by(load.number)
        if digest is None:
            self.host.ended(load.number)
            return None
        begun = self._end_load(digest)
        known = self._known[digest]
        known.arrived = True
        self.host.arrived(digest, load.contents)
        self._budget.load_cost_changed(digest)
        self._table.events.append(
            AdapterLoaded(
                digest,
                known.layout.size,
                load.seconds,
                load.pause,
                load.lacks_slab or self._has_wrong_slab(digest),
                from_host=begun.host is not None and begun.host.contents is not None,
                in_host=self.host.holds(digest),
            )
        )
        return digest

    def proof_ended(self, proved: ProofResult) -> Digest | None:
        """→ the adapter, whose order is answered; None if the attempt was given up meanwhile"""
        digest = self.proofs.attempt_ended(proved.number)
        if digest is not None:
            self._answer(self.proofs.end(digest, proved.found))
        return digest

    def doubted(self, proved: ProofResult) -> tuple[Digest, bool] | None:
        """What a slab holds is wrong. → the adapter, which is to be loaded from its files and proved again before its
        order is answered, and whether it has served: once. None if that was done, or the attempt was given up."""
        digest = self.proofs.attempt_ended(proved.number)
        if digest is None or not proved.from_slab or self._has_wrong_slab(digest):
            return None
        self._wrong_slabs[digest] = self._known[digest].layout.slab
        self._drop_in_host(digest)
        served = self.proofs.may_serve(digest)
        self.proofs.doubt(digest)
        return digest, served

    def left(self, number: int) -> None:
        """A load that has failed or was given up writes to the host's memory no more."""
        self.host.ended(number)

    def silent(self, number: int) -> None:
        """The disk does not answer. Others need not wait for this load."""
        if (digest := self._loaded_by(number)) is not None:
            self._silent.add(digest)

    def failed(self, number: int, error: MotetError) -> Digest | None:
        """A load has failed: its run is free again. The adapter stays known: a sequence that resumes asks again."""
        digest = self._loaded_by(number)
        if digest is None:
            return None
        self._answer(self.proofs.end(digest, error))
        self._budget.release(digest)
        self._gone(digest)
        return digest

    # -- recount -----------------------------------------------------------------------------------------------------

    def check(self, held: Sequence[Sequence[int]], cached: Collection[int]) -> None:
        """Recount pages and states. Raises AssertionError."""
        self._budget.check(held, cached)
        here = {digest for digest, known in self._known.items() if known.arrived}
        loading = self._loading.keys()
        assert self._answering <= self._max_loads, loading
        assert len(self._silent) <= MAX_SILENT + self._max_loads, self._silent
        assert {load.number for load in self._begun} <= {load.number for load in self._loading.values()}, self._begun
        assert self._silent <= loading, (self._silent, loading)
        assert set(self._budget.adapters) == here | loading, (self._budget.adapters, here, loading)
        assert not here & loading, (here, loading)
        assert not self._wanted.keys() & {*here, *loading}, (self._wanted, here, loading)
        assert self._wanted.keys() <= self._known.keys(), self._wanted
        self.proofs.check(self._known)
        self.host.check({digest: load.number for digest, load in self._loading.items() if load.host is not None})
        for digest in self._budget.adapters:
            assert self._budget.run_of(digest).length == self._known[digest].pages, digest

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_live(self, digest: Digest) -> bool:
        return digest in self._table.live_adapters() or digest == self.proofs.turn

    @property
    def _stays_live(self) -> IsLive:
        """`_is_live` for many adapters at a time"""
        return self._in_use().__contains__

    def _is_live_or_pinned(self, digest: Digest) -> bool:
        return self._budget.is_pinned(digest) or self._is_live(digest)

    def _in_use(self) -> AbstractSet[Digest]:
        live, turn = self._table.live_adapters(), self.proofs.turn
        return live if turn is None else live | {turn}

    def _is_awaited(self, digest: Digest) -> bool:
        """By a sequence, or it is the turn of its proof, and that breaks no promise."""
        return digest in self._table.live_adapters() or (digest == self.proofs.turn and self.promises_fit())

    @property
    def _proves_beside_nobody(self) -> bool:
        """True if an adapter is to be loaded for its proof, and no sequence can run: it need not wait for its turn. It
        loads while the one before it is proved, and takes the place of none that is still to be proved."""
        if self._answering or not self.proofs:
            return False
        if any(one == BASE or one in self._known for one in self._table.live_adapters()):
            return False
        return len(self._to_prove_here) < MAX_TO_PROVE

    @property
    def _to_prove_here(self) -> list[Digest]:
        """On the device. Thousands may be to be proved, and far fewer are here."""
        if not self.proofs:
            return []
        return [one for one in self._budget.adapters if one in self.proofs and self._has_arrived(one)]

    def _tenants_waiting(self) -> dict[Digest, set[str]]:
        """Whose sequences wait for each adapter"""
        tenants: dict[Digest, set[str]] = {}
        for sequence in self._table:
            if sequence.state is State.LOADING:
                tenants.setdefault(sequence.adapter, set()).add(sequence.tenant)
        return tenants

    def _in_turn(self, tenants: dict[Digest, set[str]]) -> list[Digest]:
        """The adapters to load, in the order in which they begin"""
        waiting = {one for those in tenants.values() for one in those}
        self._turns = {one: self._turns.get(one, self._loads) for one in waiting}
        first = self.proofs.turn

        def place(digest: Digest) -> tuple[bool, bool, int]:
            turns = (self._turns[one] for one in tenants.get(digest, ()))
            return digest != first, not self._is_live(digest), min(turns, default=0)

        return sorted(self._wanted, key=place)

    @property
    def _answering(self) -> int:
        """How many adapters load whose disks answer"""
        return len(self._loading) - len(self._silent)

    @property
    def _loads_are_full(self) -> bool:
        return self._answering >= self._max_loads or len(self._silent) >= MAX_SILENT

    def _fits_beside_loads(self, digest: Digest) -> bool:
        pages = [self._known[one].pages for one in self._loading if one not in self._silent]
        return not pages or sum(pages) + self._known[digest].pages <= self._max_pages_beside

    @property
    def _awaited(self) -> AbstractSet[Digest]:
        """The adapters that load next"""
        return self._wanted.keys() | {one for one in self._in_use() if not self._has_arrived(one)}

    def _load_cost(self, digest: Digest) -> float:
        """About how long its next load takes, in bytes that are copied"""
        size = self._known[digest].bytes
        return COST_OF_ANY + (size if self.host.holds(digest) else READ_COST * size)

    def _drop_in_host(self, digest: Digest) -> None:
        if self.host.drop(digest):
            self._left_host(digest)

    def _left_host(self, digest: Digest) -> None:
        self._budget.load_cost_changed(digest)
        self._table.events.append(AdapterLeftHost(digest))

    def _end_load(self, digest: Digest) -> AdapterLoad:
        self._silent.discard(digest)
        return self._loading.pop(digest)

    def _loaded_by(self, number: int) -> Digest | None:
        return next((digest for digest, load in self._loading.items() if load.number == number), None)

    def _has_arrived(self, digest: Digest) -> bool:
        known = self._known.get(digest)
        return known is not None and known.arrived

    def _has_wrong_slab(self, digest: Digest) -> bool:
        return self._wrong_slabs.get(digest) == self._known[digest].layout.slab

    def _has_sequences(self, digest: Digest) -> bool:
        return digest in self._table.live_adapters()

    def _answer(self, answer: ProofEnded | None) -> None:
        if answer is not None:
            self._table.events.append(answer)

    def _stays(self, digest: Digest, spare: Digest | None) -> bool:
        return digest == spare or self._is_live(digest)

    def _could_begin(self, digest: Digest) -> bool:
        return self._is_awaited(digest) and self._budget.could_grant(self._known[digest].pages, self._stays_live)

    @property
    def _some_go(self) -> bool:
        return any(map(self._forgettable, self._dropped))

    def _forgettable(self, digest: Digest) -> bool:
        return not self._table.has_users(digest)

    def _gone(self, digest: Digest) -> None:
        known = self._known[digest]
        self._evicted.append(digest)
        if known.arrived:
            known.arrived = False
            self._table.events.append(AdapterEvicted(digest))
        else:
            given_up = self._end_load(digest)
            self.host.given_up(digest)
            if given_up in self._begun:  # no worker knows it
                self._begun.remove(given_up)
                self.host.ended(given_up.number)
