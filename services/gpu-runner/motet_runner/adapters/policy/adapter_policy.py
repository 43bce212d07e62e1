"""The adapters of one runner: events and the time in, effects out.

An order has these stages. The back-off and the errors are those of its own manifest's source, whoever else wants the
same bytes:

| stage    | it waits for | then                                                                            |
|----------|--------------|---------------------------------------------------------------------------------|
| finding  | `Find`       | `FolderHeld`: checking. `NotThere`: fetching, unless its source failed just now  |
| fetching | `Fetch`      | `FolderHeld`: checking. `Failed`: it fails, and so do requests for its manifest  |
| checking | `Check`      | `Checked`: answered. `Failed`: it fails, and the runner lets the folder go       |

An order without a digest begins with fetching: only the files say which digest it is. A digest (`AdapterLife`) has
these stages:

| stage     | folder | it waits for      | then                                                                     |
|-----------|--------|-------------------|--------------------------------------------------------------------------|
| absent    | no     | an order          | forgotten when no request waits for it or uses it                        |
| looking   | no     | `Find`            | `FolderHeld` with a certificate: certified. Otherwise absent              |
| fetched   | leased | an order to check | checking                                                                 |
| checking  | leased | `Check`           | certified, or absent                                                     |
| certified | leased | nothing           | requests use it. `FolderVanished`, `EngineFailed`: looking. Idle: evicting |
| evicting  | no     | `Evict`           | `NotThere`: absent. `FolderHeld`, `Failed`: its folder and lease stay     |

Whoever says that a folder is there hands over its lease, so there is no time in which it could be evicted. A folder
that has another inode than the one that is held replaces it, and what was known about the old one is void. An answer
to an effect that nobody waits for any more is dropped, and its lease is released.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from motet.domain import Digest
from motet.errors import AdapterFetchFailed, AdapterIncompatible
from motet.runner_info import Failure
from motet_runner.adapters.policy import effects, events
from motet_runner.adapters.policy.effects import Effect
from motet_runner.adapters.policy.eviction import Eviction
from motet_runner.adapters.policy.failures import SourceFailures
from motet_runner.adapters.policy.life import AdapterLife
from motet_runner.adapters.policy.values import FetchRequest, Held, Order

MAX_MANIFESTS = 4096
"""Of how many manifests the last source is remembered, to clear what is left of a fetch when it changes or goes."""


@dataclass(slots=True, eq=False)
class FetchJob:
    """A fetch that runs, and the orders that wait for it."""

    request: FetchRequest
    orders: dict[int, Order] = field(default_factory=dict)
    late: dict[int, Order] = field(default_factory=dict)
    """They came after the fetch had begun, and want the bytes as they are now: they have the folder looked at again."""


@dataclass(slots=True, eq=False)
class Listing:
    """The disk cache is being listed, to evict what is too much."""


class AdapterPolicy:
    """`users_of` counts the requests that use an adapter, `capacity` is that of the disk cache."""

    def __init__(
        self, *, capacity: int, users_of: Callable[[Digest], int], failures: SourceFailures | None = None
    ) -> None:
        self.failures = failures if failures is not None else SourceFailures()
        self._users_of = users_of
        self._eviction = Eviction(capacity)
        self._lives: dict[Digest, AdapterLife] = {}
        self._jobs: dict[tuple[object, ...], FetchJob] = {}
        self._pending: dict[int, Order | FetchJob | AdapterLife | Listing] = {}
        """Whom the answer to each effect is for: an order that is being found, a fetch, a digest, or the eviction."""
        self._sources: OrderedDict[str, FetchRequest] = OrderedDict()
        self._numbers = count(1)
        self._now = 0.0
        self._effects: list[Effect] = []

    def __iter__(self) -> Iterator[AdapterLife]:
        return iter(self._lives.values())

    def get(self, digest: Digest) -> AdapterLife | None:
        return self._lives.get(digest)

    @property
    def settled(self) -> bool:
        """Whether no effect waits for its answer."""
        return not self._pending

    def fetch_of(self, request: FetchRequest) -> int | None:
        """The number of the fetch that runs for an order like this one."""
        job = self._jobs.get(request.key)
        return next((number for number, one in self._pending.items() if one is job), None) if job is not None else None

    def handle(self, event: events.Event, now: float) -> list[Effect]:
        self._now, self._effects = now, []
        match event:
            case events.Ordered():
                self._ordered(event.order)
            case events.OrderCancelled():
                self._order_cancelled(event.order)
            case events.RequestWaits():
                self._request_waits(event)
            case events.RequestLeft():
                if (life := self._lives.get(event.digest)) is not None:
                    life.waiters.pop(event.waiter, None)
                    self._forget_unused(life)
            case events.Used():
                self._used(event)
            case events.RequestEnded():
                if (life := self._lives.get(event.digest)) is not None:
                    self._forget_unused(life)
            case events.Dropped():
                if (life := self._lives.get(event.digest)) is not None:
                    life.drop_when_idle = True
                    self._forget_unused(life)
            case events.ManifestGone():
                self._manifest_gone(event.manifest)
            case events.FolderHeld() | events.NotThere() | events.Checked() | events.Listed() | events.Failed():
                self._answered(event)
            case events.FolderVanished():
                self._vanished(event.held)
            case events.EngineLoaded():
                if (life := self._lives.get(event.digest)) is not None:
                    life.on_device = True
            case events.EngineEvicted():
                if (life := self._lives.get(event.digest)) is not None:
                    life.on_device = False
            case events.EngineFailed():
                self._engine_failed(event.digest)
            case events.Tick():
                self.failures.expire(now)
                for life in tuple(self):
                    self._forget_unused(life)  # one that was dropped while its folder was checked
                self._effects += [
                    effects.Confirm(life.held) for life in self if life.held is not None and life.pending is None
                ]
        return self._effects

    # -------------------------------------------------------------------------------------------------------- orders

    def _ordered(self, order: Order) -> None:
        self._remember_source(order)
        if order.fetch.expected:
            self._emit(effects.Find(self._await(order), Digest(order.fetch.expected), order.fetch))
        else:
            self._fetch(order)

    def _fetch(self, order: Order) -> None:
        failure = self.failures.blocking(order.fetch, self._now)
        if failure is not None:
            self._fail_order(order, failure)
            return
        job = self._jobs.get(order.fetch.key)
        if job is None:
            self._start_fetch(FetchJob(order.fetch, {order.number: order}))
        else:
            (job.late if order.fetch.may_change else job.orders)[order.number] = order

    def _start_fetch(self, job: FetchJob, before: Held | None = None) -> None:
        self._jobs[job.request.key] = job
        self._emit(effects.Fetch(self._await(job), job.request, before))

    def _fetched(self, job: FetchJob, held: Held) -> None:
        del self._jobs[job.request.key]
        self.failures.forget(job.request)
        if job.late:
            self._start_fetch(FetchJob(job.request, job.late), before=held)
        self._enter(held, job.orders)

    def _fetch_failed(self, job: FetchJob, failure: Failure) -> None:
        del self._jobs[job.request.key]
        failure = self.failures.note(job.request, failure, self._now)
        if job.late:
            self._start_fetch(FetchJob(job.request, job.late))
        for order in job.orders.values():
            self._fail_order(order, failure)

    def _enter(self, held: Held, orders: dict[int, Order]) -> None:
        """Orders have their folder, and wait for its check."""
        if not orders:
            self._emit(effects.Release(held))
            return
        life = self._hold(held)
        life.drop_when_idle = False
        for order in orders.values():
            life.refs[order.manifest] = order.ref
            life.orders[order.number] = order
        self._advance(life)

    def _fail_order(self, order: Order, failure: Failure) -> None:
        """The order fails, and so do the requests for its manifest. Others wait for the source of their own."""
        self._emit(effects.FailOrder(order.number, failure))
        life = self._lives.get(Digest(order.fetch.expected))
        if life is None:
            return
        last = not self._is_ordered(life.digest)
        for waiter, manifest in list(life.waiters.items()):
            if manifest == order.manifest:
                self._fail_request(life, waiter, failure)
            elif not manifest and last:
                self._fail_request(life, waiter, _of_somebody(failure))
        self._forget_unused(life)

    def _order_cancelled(self, number: int) -> None:
        for key, waiting in list(self._pending.items()):
            match waiting:
                case Order() if waiting.number == number:
                    del self._pending[key]
                case FetchJob():
                    waiting.orders.pop(number, None)
                    waiting.late.pop(number, None)
                case AdapterLife():
                    waiting.orders.pop(number, None)
                case _:
                    pass

    def _is_ordered(self, digest: Digest) -> bool:
        """Whether an order is under way that may bring this digest."""
        for waiting in self._pending.values():
            match waiting:
                case Order():
                    if waiting.fetch.expected == digest:
                        return True
                case FetchJob():
                    if waiting.request.expected == digest:
                        return True
                case AdapterLife():
                    if waiting.digest == digest and waiting.orders:
                        return True
                case _:
                    pass
        return False

    # ------------------------------------------------------------------------------------------------------- sources

    def _remember_source(self, order: Order) -> None:
        before = self._sources.pop(order.manifest, None)
        self._sources[order.manifest] = order.fetch
        if len(self._sources) > MAX_MANIFESTS:
            self._sources.popitem(last=False)
        if before is not None:
            self._forget_source(before)

    def _manifest_gone(self, manifest: str) -> None:
        for life in self:
            life.refs.pop(manifest, None)
        source = self._sources.pop(manifest, None)
        if source is not None:
            self._forget_source(source)

    def _forget_source(self, source: FetchRequest) -> None:
        if all(one.origin != source.origin for one in self._sources.values()):
            self.failures.forget(source)
            self._emit(effects.ForgetPartial(source))

    # ------------------------------------------------------------------------------------------------------- requests

    def _request_waits(self, event: events.RequestWaits) -> None:
        life = self._life(event.digest)
        life.waiters[event.waiter] = event.manifest
        life.look = True
        self._advance(life)

    def _used(self, event: events.Used) -> None:
        life = self._life(event.digest)
        life.wanted_until = max(life.wanted_until, event.until)
        if life.ready:
            assert life.held is not None
            life.drop_when_idle = False
            self._emit(effects.Touch(life.held))
            self._load(life)
        else:
            life.look = True
            self._advance(life)

    def _fail_request(self, life: AdapterLife, waiter: int, failure: Failure) -> None:
        del life.waiters[waiter]
        self._emit(effects.FailRequest(waiter, failure))

    # -------------------------------------------------------------------------------------------------------- answers

    def _answered(self, answer: events.Answer) -> None:
        waiting = self._pending.pop(answer.number, None)
        match waiting, answer:
            case (None, events.FolderHeld()):
                self._emit(effects.Release(answer.held))
            case (Order(), events.FolderHeld()):
                self._enter(answer.held, {waiting.number: waiting})
            case (Order(), events.NotThere()):
                self._fetch(waiting)
            case (Order(), events.Failed()):
                self._fail_order(waiting, answer.failure)
            case (FetchJob(), events.FolderHeld()):
                self._fetched(waiting, answer.held)
            case (FetchJob(), events.Failed()):
                self._fetch_failed(waiting, answer.failure)
            case (AdapterLife(), _):
                self._digest_answered(waiting, answer)
            case (Listing(), events.Listed()):
                self._eviction.listed(answer.digests)
                self._evict_next()
            case (Listing(), events.Failed()):
                self._evict_next()
            case (None, _):
                pass
            case _:
                raise AssertionError(f"{waiting} is never answered with {answer}")

    def _digest_answered(self, life: AdapterLife, answer: events.Answer) -> None:
        asked, life.pending = life.pending, None
        match asked, answer:
            case (effects.Check(), events.Checked()):
                life.certify(answer.certification)
            case (effects.Check(), events.Failed()):
                self._check_failed(life, answer.failure)
            case (effects.Evict(), events.FolderHeld()):
                self._hold(answer.held)
            case (effects.Evict(), events.NotThere()):
                self._eviction.removed()
                if asked.held is not None or life.in_engine:
                    self._unload(life)
            case (effects.Evict(), events.Failed()):
                if asked.held is not None:
                    self._hold(asked.held)
            case (effects.Find(), events.FolderHeld()) if answer.held.certification is not None:
                self._hold(answer.held)
            case (effects.Find(), events.FolderHeld() | events.NotThere() | events.Failed()):
                if isinstance(answer, events.FolderHeld):
                    self._emit(effects.Release(answer.held))
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
            # What does not fit the base model does not fit it for anybody.
            if failure.code == AdapterIncompatible.mapping.code or manifest in manifests:
                self._fail_request(life, waiter, failure)

    def _vanished(self, held: Held) -> None:
        life = self._lives.get(held.digest)
        if life is None or life.held is None or life.held.inode != held.inode or life.pending is not None:
            return
        self._let_go(life)
        life.look = True  # another process may have stored it again
        self._advance(life)

    def _engine_failed(self, digest: Digest) -> None:
        life = self._lives.get(digest)
        if life is None:
            return
        life.on_device = False
        if life.ready:
            life.certify(None)  # until its files are known to be those that were checked
            self._look(life)

    # --------------------------------------------------------------------------------------------------------- a digest

    def _life(self, digest: Digest) -> AdapterLife:
        return self._lives.setdefault(digest, AdapterLife(digest))

    def _hold(self, held: Held) -> AdapterLife:
        """Keep the lease of a folder. If the runner holds an older one of this digest, that one is void."""
        life = self._life(held.digest)
        old = life.held
        same = old is not None and old.inode == held.inode
        if isinstance(life.pending, effects.Find) or (isinstance(life.pending, effects.Check) and not same):
            del self._pending[life.pending.number]  # its answer would be about what was there before
            life.pending = None
        if not same:
            self._let_go(life)
            life.held = held
        else:
            self._emit(effects.Release(held))
            if life.checked is None:
                life.certify(held.certification)
        return life

    def _let_go(self, life: AdapterLife) -> None:
        if life.held is not None:
            self._emit(effects.Release(life.held))
            life.held = None

    def _look(self, life: AdapterLife) -> None:
        life.look = False
        life.pending = effects.Find(self._await(life), life.digest)
        self._emit(life.pending)

    def _advance(self, life: AdapterLife) -> None:
        """Begin what is next for a digest, and answer those who waited for what it has now."""
        if life.pending is not None or self._lives.get(life.digest) is not life:
            return
        if life.held is None:
            if life.look:
                self._look(life)
            else:
                self._forget_unused(life)
            return
        for order in list(life.orders.values()):
            if life.checked is not None or not order.check:
                del life.orders[order.number]
                self._emit(effects.AnswerOrder(order.number, life.digest))
                if order.load and life.checked is not None:
                    self._load(life)
                if self._eviction.answered(life.digest):
                    self._list()
        if life.checked is None:
            if life.orders:
                life.pending = effects.Check(self._await(life), life.held)
                self._emit(life.pending)
            return
        life.look = False
        for waiter in life.waiters:
            self._emit(effects.AnswerRequest(waiter))
        life.waiters.clear()
        if self._now < life.wanted_until:
            self._load(life)

    def _load(self, life: AdapterLife) -> None:
        if not life.on_device and not life.drop_when_idle and life.checked is not None:
            life.in_engine = True
            self._emit(effects.Load(life.digest, life.checked.layout))

    def _unload(self, life: AdapterLife) -> None:
        life.in_engine = life.on_device = False
        self._emit(effects.Unload(life.digest))

    def _forget_unused(self, life: AdapterLife) -> None:
        """Forget a digest that nobody waits for or uses, if its folder has gone or it was dropped."""
        if self._lives.get(life.digest) is not life or not life.idle or self._users_of(life.digest):
            return
        if life.held is not None and not life.drop_when_idle:
            return
        del self._lives[life.digest]
        if life.held is not None or life.in_engine:
            self._unload(life)
        self._let_go(life)

    # ------------------------------------------------------------------------------------------------------- eviction

    def _list(self) -> None:
        self._emit(effects.ListCache(self._await(Listing())))

    def _evict_next(self) -> None:
        digest = self._eviction.next(self._in_use)
        if digest is None:
            if self._eviction.ended():
                self._list()
            return
        life = self._life(digest)
        life.pending = effects.Evict(self._await(life), digest, life.held)
        life.held = None
        self._emit(life.pending)

    def _in_use(self, digest: Digest) -> bool:
        life = self._lives.get(digest)
        used = life is not None and (not life.idle or self._now < life.wanted_until)
        return used or self._users_of(digest) > 0 or self._is_ordered(digest)

    # --------------------------------------------------------------------------------------------------------- inside

    def _await(self, who: "Order | FetchJob | AdapterLife | Listing") -> int:
        number = next(self._numbers)
        self._pending[number] = who
        return number

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def check_consistent(self) -> None:
        """For tests: whoever waits has an effect that will be answered, or waits for an order."""
        for life in self:
            if life.pending is not None:
                assert self._pending.get(life.pending.number) is life, f"{life} waits for nothing"
            assert not life.orders or life.pending is not None, f"{life} has orders that nothing answers"
            assert not life.waiters or not life.ready, f"{life} is ready, and requests wait for it"
            assert life.held is not None or life.pending is not None or not life.look, f"{life} is not looked for"
        for job in self._jobs.values():
            assert any(one is job for one in self._pending.values()), f"{job} waits for nothing"


def _of_somebody(failure: Failure) -> Failure:
    """For a request of which nobody says whose adapter it wants: not a word about any source."""
    error = AdapterFetchFailed(AdapterFetchFailed.public_message + ".", retry_after=failure.retry_after)
    return Failure.of(error)
