"""The policy for the adapters of one runner: it gets events and the time, and returns effects."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from motet.clock import Clock
from motet.domain import Digest
from motet.errors import AdapterFetchFailed, AdapterIncompatible, AdapterUnproved
from motet.runner_info import Failure
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.policy import effects
from motet_runner.adapters.policy.effects import Answer, Effect
from motet_runner.adapters.policy.eviction import CacheLimits, Eviction
from motet_runner.adapters.policy.failures import SourceFailures
from motet_runner.adapters.policy.kept_revisions import KeptRevisions
from motet_runner.adapters.policy.life import AdapterLife
from motet_runner.adapters.policy.order_refusal import refusal_of
from motet_runner.adapters.policy.pending import FetchJob, Listing, Pending
from motet_runner.adapters.policy.proof_orders import ProofOrders
from motet_runner.adapters.policy.slabs import SlabQueue
from motet_runner.adapters.policy.turns import Turns
from motet_runner.adapters.policy.values import CacheContents, FetchRequest, Held, Order
from motet_runner.adapters.proof import Proof
from motet_runner.engine_messages import DropAdapter, LoadAdapter, WriteSlab
from motet_runner.sources.fetch_errors import no_room, too_large

MAX_MANIFESTS = 4096
"""For how many manifests the last sources are remembered: the partial fetch of one is removed when it is named no more.
"""
CONFIRMED_AT_ONCE = 500
"""How many folders are looked at together: some milliseconds, which another call waits for."""

MAX_REFUSED = 1024
"""Of how many adapters a process remembers that their proofs have failed: the newest ones. Each hello tells them."""

PROVE_AGAIN_SECONDS = 60.0
"""When the next attempt follows a proof that the engine has given up, if the error names no time"""


class AdapterPolicy:
    """Its methods report what has happened; then `take_effects` returns the effects to carry out. `users_of` counts the
    requests that use an adapter; `limits` are the disk cache's."""

    def __init__(
        self,
        *,
        limits: CacheLimits,
        users_of: Callable[[Digest], int],
        clock: Clock,
        failures: SourceFailures,
        slab_bytes: Callable[[int], int] = lambda _: 0,
        proves_with: str | None = None,
        proves_linears: bool = True,
        build: str = "",
        turns: Turns | None = None,
    ) -> None:
        """`slab_bytes`: how many a slab has at most, by the adapter's rank. `proves_with`: the engine's kernels; None:
        it proves and compares nothing. `proves_linears`: else it only compares recorded answers. `build`: a name of all
        that its proofs depend on but machine and kernels."""
        self.proofs = ProofOrders(proves_with, linears=proves_linears)
        self._failures = failures
        self._users_of = users_of
        self._clock = clock
        self._eviction = Eviction(limits)
        self.revisions = KeptRevisions()
        self._slabs = SlabQueue()
        self._slabs_written: set[Digest] = set()
        """Since the cache was listed"""
        self._slab_bytes = slab_bytes
        self._build = build
        self._lives: dict[Digest, AdapterLife] = {}
        self.jobs: dict[tuple[object, ...], FetchJob] = {}
        self.pending = Pending()
        self._turns = Turns() if turns is None else turns
        self._pinned: frozenset[Digest] = frozenset()
        self._sources: OrderedDict[str, dict[bool, FetchRequest]] = OrderedDict()
        """Of each manifest, where a revision comes from that serves, and one that does not yet: they are ordered in
        turn."""
        self._unconfirmed: Iterator[Digest] = iter(())
        """Whose folders are still to be looked at in this round."""
        self._confirming = False
        self._effects: list[Effect] = []
        self.refused: dict[Digest, Failure] = {}
        """What this process has found wrong, and has not proved since"""
        self.knows_all_refused = True
        """It has forgotten none of them."""
        self._here: dict[Digest, None] = {}
        """The adapters on the device"""
        self.changed: dict[Digest, None] = {}
        """The adapters whose tier may have changed since `take_changed`."""

    def __iter__(self) -> Iterator[AdapterLife]:
        return iter(self._lives.values())

    def get(self, digest: Digest) -> AdapterLife | None:
        return self._lives.get(digest)

    @property
    def slab_under_way(self) -> Digest | None:
        return self._slabs.current

    def take_effects(self) -> list[Effect]:
        taken, self._effects = self._effects, []
        return taken

    def take_changed(self) -> dict[Digest, None]:
        taken, self.changed = self.changed, {}
        return taken

    def fetch_of(self, request: FetchRequest) -> int | None:
        """The number of the running fetch for an order like this one."""
        job = self.jobs.get(request.key)
        return self.pending.number_of(job) if job is not None else None

    def tick(self) -> None:
        """Time passed."""
        self._failures.expire(self._clock())
        for life in [life for life in self if life.held is None or life.drop_when_idle]:
            self._forget_unused(life)  # the adapter may have been dropped while its folder was checked
        self.proofs.prove_again(self)
        self._prove_again()
        if self._eviction.waiting():
            self._list()
        self._next_slab()
        if not self._confirming:
            self._unconfirmed = iter(list(self._lives))
            self._confirm_some()

    def confirmed(self, vanished: Iterable[Held], *, wished: bool = False) -> None:
        """Takes the answer to `ConfirmAll`. Only then the next ones are looked at: if the disk is slow, other calls
        come between, and no looks pile up. `wished`: another runner of the cache asks for room."""
        for held in vanished:
            self.vanished(held)
        if wished and self._eviction.others_wish():
            self._list(for_others=True)
        self._confirm_some()

    def _confirm_some(self) -> None:
        lives = (life for digest in self._unconfirmed if (life := self._lives.get(digest)) is not None)
        held = (life.held for life in lives if life.held is not None and life.pending is None)
        some = tuple(islice(held, CONFIRMED_AT_ONCE))
        self._confirming = bool(some)
        if some:
            self._emit(effects.ConfirmAll(some))

    # -------------------------------------------------------------------------------------------------------- orders

    def order(self, order: Order) -> None:
        self._remember_source(order)
        if order.fetch.expected:
            self._emit(effects.Find(self.pending.add(order), Digest(order.fetch.expected), order.fetch))
        else:
            self._fetch(order)

    def _fetch(self, order: Order) -> None:
        if order.cached_only:
            text = f"This runner does not have the files of {order.fetch.expected} in its disk cache."
            self._fail_order(order, Failure.of(AdapterFetchFailed(text)))
            return
        failure = self._failures.blocking(order.fetch, self._clock())
        if failure is not None:
            self._fail_order(order, failure)
            return
        job = self.jobs.get(order.fetch.key)
        if job is None:
            self._start_fetch(FetchJob(order.fetch, {order.number: order}))
        else:
            (job.late if job.is_too_early_for(order) else job.orders)[order.number] = order

    def _start_fetch(self, job: FetchJob, before: Held | None = None) -> None:
        self.jobs[job.request.key] = job
        awaited = bool(job.request.expected) and self._is_used(Digest(job.request.expected))
        self._emit(effects.Fetch(self.pending.add(job), job.request, before, awaited))

    def _fetched(self, job: FetchJob, held: Held) -> None:
        del self.jobs[job.request.key]
        self._failures.forget(job.request)
        if job.late:
            self._start_fetch(FetchJob(job.request, job.late), before=held)
        self._enter(held, job.orders)

    def _fetch_failed(self, job: FetchJob, failure: Failure) -> None:
        del self.jobs[job.request.key]
        failure = self._failures.note(job.request, failure, self._clock())
        if job.late:
            self._start_fetch(FetchJob(job.request, job.late))
        for order in job.orders.values():
            self._fail_order(order, failure)

    def _enter(self, held: Held, orders: dict[int, Order]) -> None:
        """The orders have their folder, and wait for its check."""
        if not orders:
            self._emit(effects.Release(held))
            return
        life = self._hold(replace(held, stamp=None))
        self._drop_when_idle(life, drop=False)
        for order in orders.values():
            life.generations[order.manifest] = order.ref.generation
            if order.load:
                life.proved_builds = order.proved_builds if life.digest not in self.refused else ()
            life.orders[order.number] = order
        self._advance(life)

    def _fail_order(self, order: Order, failure: Failure) -> None:
        """The order fails, and so do the requests for its manifest. Other requests wait for the fetch from their own
        source. A request without a manifest fails if no other order may bring the digest."""
        self._emit(effects.Fail(order.number, failure))
        life = self._lives.get(Digest(order.fetch.expected))
        if life is None:
            return
        last = not self.pending.may_bring(life.digest)
        for waiter, manifest in list(life.waiters.items()):
            if manifest == order.manifest:
                self._fail_request(life, waiter, failure)
            elif not manifest and last:
                self._fail_request(life, waiter, _of_somebody(failure))
        self._forget_unused(life)

    def cancel_order(self, number: int) -> None:
        """The order needs no answer any more, and loads nothing. Its fetch and check go on, because the next order will
        want the files."""
        self.pending.cancel_order(number)
        for life in self:
            life.orders.pop(number, None)

    # ------------------------------------------------------------------------------------------------------- sources

    def _remember_source(self, order: Order) -> None:
        sources = self._sources.pop(order.manifest, {})
        serves = order.fetch.digest_verified
        before, sources[serves] = sources.get(serves), order.fetch
        self._sources[order.manifest] = sources
        if len(self._sources) > MAX_MANIFESTS:
            self._sources.popitem(last=False)
        if before is not None and before.origin != order.fetch.origin:
            self._forget_source(before)

    def manifest_gone(self, manifest: str) -> None:
        self.revisions.gone(manifest)
        for life in self:
            life.generations.pop(manifest, None)
        for source in self._sources.pop(manifest, {}).values():
            self._forget_source(source)

    def _forget_source(self, source: FetchRequest) -> None:
        if all(one.origin != source.origin for some in self._sources.values() for one in some.values()):
            self._failures.forget(source)
            self._emit(effects.ForgetPartial(source))

    # ------------------------------------------------------------------------------------------------------- requests

    def request_waits(self, waiter: int, digest: Digest, manifest: str) -> None:
        """`manifest`: the adapter that the client named, as namespace/name. Empty: the gateway does not tell."""
        life = self._life(digest)
        life.waiters[waiter] = manifest
        life.look = True
        self._advance(life)

    def request_left(self, waiter: int, digest: Digest) -> None:
        """A request waits no longer."""
        if (life := self.get(digest)) is not None:
            life.waiters.pop(waiter, None)
            self._forget_unused(life)

    def use(self, digest: Digest, until: float = 0.0) -> None:
        """A request starts, or was announced: do not evict the adapter before `until`."""
        life = self._life(digest)
        if not until:
            self._eviction.frequency.used(digest)
        life.wanted_until = max(life.wanted_until, until)
        if life.ready:
            assert life.held is not None
            self._drop_when_idle(life, drop=False)
            self._emit(effects.Confirm(life.held))
            self._load(life)
            self._tell_pin(life)
        else:
            life.look = True
            self._advance(life)

    def request_ended(self, digest: Digest) -> None:
        if (life := self.get(digest)) is not None:
            self._forget_unused(life)

    def drop(self, digest: Digest, manifest: str = "") -> None:
        """The scheduler no longer needs a digest. The files stay until the disk cache needs the space. `manifest`: an
        adapter that has served it before, and has another revision now."""
        if manifest:
            self.revisions.replaced(manifest, digest)
        if (life := self.get(digest)) is not None:
            self._drop_when_idle(life, drop=True)
            self._forget_unused(life)

    def pin(self, digests: frozenset[Digest]) -> None:
        """The platform wants these adapters resident, also without requests, and no others."""
        before, self._pinned = self._pinned, digests
        for digest in sorted(before ^ digests):
            life = self._lives.get(digest)
            if life is not None:
                self._tell_pin(life)

    def _tell_pin(self, life: AdapterLife) -> None:
        """If the engine has the adapter, and was told otherwise. While the folder is looked for or checked, it is told
        nothing: `_advance` comes after that."""
        pinned = life.digest in self._pinned
        if life.in_engine and life.pinned is not pinned and life.checked is not None and not life.drop_when_idle:
            self._emit_load(life, life.checked)

    def _fail_request(self, life: AdapterLife, waiter: int, failure: Failure) -> None:
        del life.waiters[waiter]
        self._emit(effects.Fail(waiter, failure))

    # -------------------------------------------------------------------------------------------------------- answers

    def answered(self, number: int, answer: Answer) -> None:
        """Takes the answer to a numbered effect."""
        asker = self.pending.pop(number)
        if (following := self._turns.ended(number, self._turn_of_check)) is not None:
            self._emit(following)
        if self._eviction.fetch_ended(number):
            self._list()
        match asker, answer:
            case (None, Held()):
                self._emit(effects.Release(answer))
            case (Order(), Held()):
                self._enter(answer, {asker.number: asker})
            case (Order(), None):
                self._fetch(asker)
            case (Order(), Failure()):
                self._fail_order(asker, answer)
            case (FetchJob(), Held()):
                self._fetched(asker, answer)
            case (FetchJob(), Failure()):
                self._fetch_failed(asker, answer)
            case (AdapterLife(), _):
                self._digest_answered(asker, answer)
            case (Listing(), CacheContents()):
                ranks = self.revisions.ranks([one.digest for one in answer.by_last_use], self._serves)
                self._eviction.listed(answer, self._is_pinned, self._is_used, ranks, cleared=asker.cleared)
                self._refuse(self._eviction.refused())  # first: nothing leaves for a fetch that gets no room anyway
                if clear := self._eviction.to_clear():
                    self._list(clear, for_others=asker.for_others)
                else:
                    self._evict_next()
            case (Listing(), Failure()):
                for fetch in self._eviction.listing_failed():
                    self._emit(effects.RefuseRoom(fetch, answer))
                if self._eviction.spare_granted() is not None:
                    self._slab_ended(0)
                self._eviction_ended()
            case (None, _):
                pass
            case _:
                raise AssertionError(f"{asker} is never answered with {answer}")

    def _turn_of_check(self, number: int) -> int | None:
        """Of a check that waits"""
        life = self.pending.askers.get(number)
        if not isinstance(life, AdapterLife):
            return None
        return 0 if self._is_used(life.digest) else 1

    def _digest_answered(self, life: AdapterLife, answer: Answer) -> None:
        asked, life.pending = life.pending, None
        self.changed[life.digest] = None
        match asked, answer:
            case (effects.Check(), Certification()):
                life.certify(answer)
                if answer.lacks_slab and not self.proofs.concerns(life):  # else the load of its proof says so
                    self._want_slab(life)
            case (effects.Check(), Failure()):
                self._check_failed(life, answer)
            case (effects.Evict(), Held()):
                self._eviction.kept()
                self._hold(answer)
            case (effects.Evict(), None):
                self._eviction.removed()
                if asked.held is not None or life.in_engine:
                    self._unload(life)
            case (effects.Evict(), Failure()):
                self._eviction.kept()
                if asked.held is not None:
                    self._hold(asked.held)
            case (effects.Find(), Held(certification=Certification())):
                self._hold(answer)
            case (effects.Find(), Held() | Failure() | None):
                if isinstance(answer, Held):
                    self._emit(effects.Release(answer))
                self._let_go(life)
            case _:
                raise AssertionError(f"{asked} is never answered with {answer}")
        self._advance(life)
        if isinstance(asked, effects.Evict):
            self._evict_next()

    def _check_failed(self, life: AdapterLife, failure: Failure) -> None:
        self._let_go(life)
        orders = list(life.orders.values())
        life.orders.clear()
        for order in orders:
            self._fail_order(order, failure)
        manifests = {order.manifest for order in orders}
        for waiter, manifest in list(life.waiters.items()):
            # If an adapter does not fit the base model, every request for it fails.
            if failure.code == AdapterIncompatible.mapping.code or manifest in manifests:
                self._fail_request(life, waiter, failure)

    def vanished(self, held: Held) -> None:
        """A held folder is no longer at its place."""
        life = self.get(held.digest)
        if life is None or life.held is None or life.held.inode != held.inode or life.pending is not None:
            return
        self._let_go(life)
        life.look = True  # another process may have stored the files again
        self._advance(life)

    def engine_has(self, digest: Digest, *, on_device: bool) -> None:
        """The engine has loaded the adapter into device memory, or evicted it from there."""
        if (life := self.get(digest)) is not None:
            self._on_device(life, on_device=on_device)

    def engine_keeps(self, digest: Digest, *, in_host: bool) -> None:
        """The engine keeps the adapter in host memory for its next load, or keeps it no more."""
        life = self.get(digest)
        if life is not None and life.in_host is not in_host:
            life.in_host = in_host
            self.changed[digest] = None

    def engine_lists(self, digest: Digest, *, on_device: bool) -> None:
        """So says the engine's report. It may be older than a command that the engine forget the adapter."""
        life = self.get(digest)
        if life is not None and life.in_engine:
            self._on_device(life, on_device=on_device)

    def slab_missing(self, digest: Digest) -> None:
        """The engine has loaded the adapter from its checked bytes, because it has no slab."""
        if (life := self.get(digest)) is not None:
            self._want_slab(life)

    def _want_slab(self, life: AdapterLife) -> None:
        if not life.ready or life.checked is None or life.digest == self._slabs.current:
            return
        if life.checked.layout.slab:
            self._slabs.add(life.digest)
            self._next_slab()

    def slab_written(self, number: int, size: int) -> None:
        """The engine has done with a slab of `size` bytes. 0: it could not be written."""
        if number == self._slabs.number and self._slabs.current is not None:
            self._slabs.written(self._clock(), success=size > 0)
            self._slabs_written.add(self._slabs.current)
            self._slab_ended(size)

    def kernels_serve(self, kernels: str) -> None:
        """The engine's present kernels. What others have proved serves on, and is proved again."""
        if self.proofs.kernels in (None, kernels):
            return
        self.proofs.serve_with(kernels)
        self.proofs.prove_again(self)
        self._prove_again()

    def engine_proved(self, digest: Digest, number: int, proof: Proof) -> None:
        """The answer to an order: the adapter's results are right."""
        self.kernels_serve(proof.kernels)
        if not self.proofs.answered(digest, number):
            return
        self.refused.pop(digest, None)
        if (life := self.get(digest)) is not None and life.checked is not None:
            life.add_proof(proof)
            self._advance(life)
        self._prove_again()

    def engine_proved_not(self, digest: Digest, number: int, failure: Failure) -> None:
        """The answer to an order: the results are wrong. Then nobody gets the adapter from these files, until they are
        ordered again. Or the engine has given up, for this reason."""
        if not self.proofs.answered(digest, number):
            return
        if failure.code == AdapterUnproved.mapping.code:
            self._note_refused(digest, failure)
        if (life := self.get(digest)) is not None:
            orders, life.orders = life.orders, {}
            failure = _of_a_proof(failure)
            wrong = failure.code == AdapterUnproved.mapping.code and life.ready
            if wrong:
                self._unload(life)
                self._let_go(life)
            elif failure.retry_after <= 0:
                self.proofs.give_up(digest)
            for order in orders.values():
                self._fail_order(order, failure)
            for waiter in [*life.waiters] if wrong else ():
                self._fail_request(life, waiter, failure)
            self._forget_unused(life)
        self._prove_again()

    def _note_refused(self, digest: Digest, failure: Failure) -> None:
        self.refused.pop(digest, None)
        self.refused[digest] = failure
        if (life := self.get(digest)) is not None:
            life.proved_builds = ()
        if len(self.refused) > MAX_REFUSED:
            del self.refused[next(iter(self.refused))]
            self.knows_all_refused = False

    def _prove_again(self) -> None:
        while (digest := self.proofs.next_again(self._here)) is not None:
            life = self.get(digest)
            if life is not None and life.ready and life.checked is not None and not life.drop_when_idle:
                life.in_engine = True
                self._emit_load(life, life.checked)

    def engine_failed(self, digest: Digest) -> None:
        """The engine could not load the adapter: its files may have changed."""
        life = self.get(digest)
        if life is None:
            return
        self._on_device(life, on_device=False)
        self.changed[digest] = None
        self.proofs.forget(digest)  # the engine has answered before, if it could
        if life.ready:
            life.certify(None)  # until the files are known to be the checked files
            self._look(life)

    def template_lost(self, digest: Digest) -> None:
        """The files are checked again, and that writes it anew."""
        life = self.get(digest)
        if life is not None and life.ready:
            life.certify(None)
            self.changed[digest] = None
            self._check(life)

    # --------------------------------------------------------------------------------------------------------- a digest

    def _check(self, life: AdapterLife) -> None:
        assert life.held is not None
        life.pending = check = effects.Check(self.pending.add(life), life.held)
        namespace = next((order.ref.namespace for order in life.orders.values()), "")
        if self._turns.begin(check, namespace):
            self._emit(check)

    def _life(self, digest: Digest) -> AdapterLife:
        return self._lives.setdefault(digest, AdapterLife(digest, build=self._build))

    def _hold(self, held: Held) -> AdapterLife:
        """Keep the lease of a folder. If the runner holds an older folder of this digest, that lease is released."""
        life = self._life(held.digest)
        self.changed[life.digest] = None
        old = life.held
        same = old is not None and old.inode == held.inode
        if isinstance(life.pending, effects.Find) or (isinstance(life.pending, effects.Check) and not same):
            self.pending.pop(life.pending.number)  # the answer would be about the old folder
            life.pending = None
        if not same:
            self._let_go(life)
            life.held = held
        else:
            self._emit(effects.Release(held))
            if life.checked is None:
                life.certify(held.certification)
        return life

    def _drop_when_idle(self, life: AdapterLife, *, drop: bool) -> None:
        if life.drop_when_idle is not drop:
            life.drop_when_idle = drop
            self.changed[life.digest] = None

    def _on_device(self, life: AdapterLife, *, on_device: bool) -> None:
        if life.on_device is not on_device:
            life.on_device = on_device
            self.changed[life.digest] = None
            if on_device:
                self._here[life.digest] = None
            else:
                self._here.pop(life.digest, None)

    def _let_go(self, life: AdapterLife) -> None:
        self.changed[life.digest] = None
        self.proofs.forget(life.digest)
        if life.held is not None:
            self._emit(effects.Release(life.held))
            life.held = None

    def _look(self, life: AdapterLife) -> None:
        life.look = False
        life.pending = effects.Find(self.pending.add(life), life.digest)
        self._emit(life.pending)

    def _advance(self, life: AdapterLife) -> None:
        """Begin the next stage of a digest, and answer the orders and requests that waited for the present stage."""
        if life.pending is not None or self._lives.get(life.digest) is not life:
            return
        if life.held is None:
            if life.look:
                self._look(life)
                return
            orders, life.orders = life.orders, {}
            for order in orders.values():
                self._fetch(order)  # the folder went while the order waited for a proof
            self._forget_unused(life)
            return
        for order in list(life.orders.values()):
            if self.proofs.decides(order, life) or not order.check:
                del life.orders[order.number]
                refused = refusal_of(order, life)
                if refused is not None:
                    self._fail_order(order, Failure.of(refused))
                    continue
                self._emit(effects.Succeed(order.number, life.digest))
                self.revisions.serves(order.manifest, life.digest)
                if order.load and life.checked is not None:
                    self._load(life)
                if self._eviction.answered(life.digest):
                    self._list()
        if life.checked is None:
            if life.orders:
                self._check(life)
            return
        if life.orders:
            self._load(life)  # it is proved there
        life.look = False
        for waiter in life.waiters:
            self._emit(effects.Succeed(waiter, life.digest))
        life.waiters.clear()
        if self._clock() < life.wanted_until:
            self._load(life)
        self._tell_pin(life)

    def _load(self, life: AdapterLife) -> None:
        waits_for_proof = self.proofs.concerns(life) and bool(life.orders)
        if (life.drop_when_idle and not waits_for_proof) or life.checked is None:
            return
        if not life.on_device or self.proofs.lacks(life):
            life.in_engine = True
            self._emit_load(life, life.checked)

    def _emit_load(self, life: AdapterLife, checked: Certification) -> None:
        """An order that the engine has not answered is told again: it is the same order."""
        life.pinned = life.digest in self._pinned
        self._emit(LoadAdapter(life.digest, checked.layout, self.proofs.order(life), pinned=life.pinned))

    def _unload(self, life: AdapterLife) -> None:
        life.in_engine = life.in_host = False
        self._on_device(life, on_device=False)
        self._emit(DropAdapter(life.digest))

    def _forget_unused(self, life: AdapterLife) -> None:
        """Forget a digest without waiters and users, if its folder is gone or the digest was dropped."""
        if life.held is not None and not life.drop_when_idle:
            return
        if self._lives.get(life.digest) is not life or not life.idle or self._users_of(life.digest):
            return
        if life.digest == self._slabs.current:
            return  # its lease is needed; it is asked again when the slab has ended
        del self._lives[life.digest]
        self._here.pop(life.digest, None)
        if life.held is not None or life.in_engine:
            self._unload(life)
        self._let_go(life)

    # ------------------------------------------------------------------------------------------------------- eviction

    def needs(self, fetch: int, size: int) -> None:
        """A running fetch is about to write files, of `size` bytes in all. It waits for `GrantRoom` or `RefuseRoom`."""
        limit = self._eviction.limits.bytes
        if limit is not None and size > limit:
            text = f"{self._named(fetch)} has {size} bytes, but engine.adapterDiskMiB allows {limit} for all adapters."
            self._emit(effects.RefuseRoom(fetch, Failure.of(too_large(text))))
            return
        job = self.pending.askers.get(fetch)
        brings = Digest(job.request.expected) if isinstance(job, FetchJob) else None
        if self._eviction.ask(fetch, size, pinned=brings in self._pinned):
            self._list()

    def _refuse(self, fetches: list[int]) -> None:
        for fetch in fetches:
            text = (
                f"There is no room for {self._named(fetch)}: what is used now or fetched, or kept by another "
                "runner in this cache, leaves too little of engine.adapterDiskMiB. Raise it, or use fewer adapters at "
                "once. Motet tries again automatically."
            )
            self._emit(effects.RefuseRoom(fetch, Failure.of(no_room(text))))
        if size := self._eviction.take_wish():
            self._emit(effects.WishRoom(size))

    def _named(self, fetch: int) -> str:
        job = self.pending.askers.get(fetch)
        return job.request.source if isinstance(job, FetchJob) else "The adapter"

    def _list(self, clear: int = 0, *, for_others: bool = False) -> None:
        number = self.pending.add(Listing(clear > 0, for_others))
        changed, self._slabs_written = frozenset(self._slabs_written), set()
        limit, room = self._eviction.limits.adapters, self._eviction.room
        self._emit(effects.ListCache(number, limit, room, clear, changed, for_others))

    def _evict_next(self) -> None:
        self._refuse(self._eviction.refused())  # another process may use what was to leave
        digest = self._eviction.next(self._in_use)
        if digest is None:
            for fetch in self._eviction.granted():
                self._emit(effects.GrantRoom(fetch))
            self._refuse(self._eviction.stuck())
            self._grant_slab(self._eviction.spare_granted())
            self._eviction_ended()
            return
        life = self._life(digest)
        life.pending = effects.Evict(self.pending.add(life), digest, life.held)
        life.held = None
        self.changed[digest] = None
        self._emit(life.pending)

    def _eviction_ended(self) -> None:
        if self._eviction.ended():
            self._list()

    def _is_pinned(self, digest: Digest) -> bool:
        return digest in self._pinned

    def _serves(self, digest: Digest) -> bool:
        life = self._lives.get(digest)
        return life is not None and not life.drop_when_idle

    def _is_used(self, digest: Digest) -> bool:
        life = self._lives.get(digest)
        awaited = life is not None and (bool(life.waiters) or self._clock() < life.wanted_until)
        return awaited or self._users_of(digest) > 0

    def _in_use(self, digest: Digest) -> bool:
        """By requests, or by an order or a call, which will end."""
        life = self._lives.get(digest)
        busy = (life is not None and not life.idle) or digest == self._slabs.current
        return self._is_used(digest) or busy or self.pending.may_bring(digest)

    # ---------------------------------------------------------------------------------------------------------- slabs

    def _next_slab(self) -> None:
        while (digest := self._slabs.begin(self._clock())) is not None:
            life = self._lives.get(digest)
            if life is not None and life.ready and life.checked is not None:
                if self._eviction.limits.bytes is None:
                    self._grant_slab(granted=True)
                elif self._eviction.ask_spare(self._slab_bytes(life.checked.layout.rank)):
                    self._list()
                return
            self._slabs.end()

    def _grant_slab(self, granted: bool | None) -> None:
        if granted is None or self._slabs.current is None:
            return
        if not granted:
            self._slabs.pause(self._clock())
        life = self._lives.get(self._slabs.current)
        if granted and life is not None and life.ready and life.checked is not None:
            self._emit(WriteSlab(self._slabs.number, life.checked.layout))
        else:
            self._slab_ended(0)

    def _slab_ended(self, size: int) -> None:
        digest = self._slabs.end()
        if self._eviction.spare_ended(size):
            self._list()
        if digest is not None and (life := self._lives.get(digest)) is not None:
            self._forget_unused(life)
        self._next_slab()

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)


def _of_a_proof(failure: Failure) -> Failure:
    """Only what is wrong with the adapter itself, or with how it is computed, is final."""
    if failure.retry_after > 0 or failure.code in (AdapterUnproved.mapping.code, AdapterIncompatible.mapping.code):
        return failure
    return replace(failure, retry_after=PROVE_AGAIN_SECONDS)


def _of_somebody(failure: Failure) -> Failure:
    """The failure for a request of unknown owner. It must tell nothing about any source."""
    return Failure.of(AdapterFetchFailed(AdapterFetchFailed.public_message + ".", retry_after=failure.retry_after))
