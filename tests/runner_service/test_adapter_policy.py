"""Two runners with one disk cache: whatever is ordered, fails, vanishes and answers in whatever order.

Each runner's policy is the product's own, and so are cache, leases, copies and checks; they are called here, one after
the other, in the order that Hypothesis chooses. A call that was not made yet is one that takes long.
"""

import errno
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.clock import FakeClock
from motet.digest import adapter_digest
from motet.domain import Digest
from motet.errors import AdapterFetchFailed, AdapterIncompatible, AdapterUnproved, MotetError
from motet.runner_info import Failure
from motet_runner.adapters.adapter_files import FILE_THREADS
from motet_runner.adapters.cache import DiskCache
from motet_runner.adapters.certification import Certification
from motet_runner.adapters.checks import Checks
from motet_runner.adapters.folder_fetch import copy_folder
from motet_runner.adapters.kept_proofs import KeptProofs, ProofKey
from motet_runner.adapters.layout import AdapterLayout, FileStamp
from motet_runner.adapters.peft_config import WEIGHTS_NAME
from motet_runner.adapters.policy import effects
from motet_runner.adapters.policy.adapter_policy import AdapterPolicy
from motet_runner.adapters.policy.eviction import CacheLimits
from motet_runner.adapters.policy.failures import MAX_PER_NAMESPACE, SourceFailures
from motet_runner.adapters.policy.turns import MAX_CHECKS, Turns
from motet_runner.adapters.policy.values import CacheContents, Cached, FetchRequest, Held, Order
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.adapters.residency import Residency
from motet_runner.adapters.slab import Slab, SlabDamaged, remove_damaged, write_slab
from motet_runner.engine_messages import DropAdapter, LoadAdapter, WriteSlab
from motet_runner.sources.fetch_errors import credentials
from motet_runner.sources.folder import AdapterFolder
from tests.support.in_process_runner import write_adapter

TENANTS = ("acme", "zeta")
ADAPTERS = ("pirate", "poet", "pilot", "refused")
"""Each tenant has each of them, with equal bytes, in a folder of its own."""

NEWER = {"pirate": "pirate, newer", "poet": "poet, newer"}
"""Adapter → its second revision, which a tenant publishes in the first one's place."""

REVISIONS = (*ADAPTERS, *NEWER.values())

CAPACITY = 2

KERNELS = ("torch", "cpp")


def key_of(base: Digest) -> ProofKey:
    return ProofKey(base, "float32", "tile 8", "motet", "cpu", "1")


def check(folder: Path) -> Certification:
    if "refused" in (folder / "adapter_config.json").read_text():
        raise AdapterIncompatible("it says refused")
    layout = AdapterLayout.of(folder / WEIGHTS_NAME, FileStamp.of(folder / WEIGHTS_NAME), 4, ())
    return Certification.of(scheduler_pb2.Certificate(rank=4), layout)


LINEARS = ("q", "v")
RUN_BYTES = 9000


def run_of(weights: Path) -> np.ndarray:
    """What the engine makes of these weights"""
    content = np.frombuffer(weights.read_bytes(), np.uint8)
    return np.resize(content, RUN_BYTES)


class Runner:
    """One runner's policy on the shared cache."""

    def __init__(self, shared: "SharedCache") -> None:
        self.shared = shared
        self.cache = DiskCache(shared.folder / "cache", max_adapter_bytes=1 << 20)
        self.cache.prepare()
        base = Digest("sha256:" + "b" * 64)
        proofs = KeptProofs(self.cache, key_of(base))
        self.checks = Checks(self.cache, check, base_digest=base, run_layout="one", proofs=proofs)
        self.users: Counter[Digest] = Counter()
        self.policy = AdapterPolicy(
            limits=CacheLimits(CAPACITY),
            users_of=lambda digest: self.users[digest],
            clock=shared.clock,
            failures=SourceFailures(),
            proves_with=KERNELS[0],
            turns=Turns(1),
        )
        self.kernels = KERNELS[0]
        self.to_prove: dict[Digest, ProofOrder] = {}
        """The orders that the engine has not answered"""
        self.undone: list[Any] = []
        self.orders: dict[int, Order] = {}
        self.waiters: dict[int, tuple[Digest, str]] = {}
        self.leases: list[Held] = []
        self.pinned: frozenset[Digest] = frozenset()
        self.engine: dict[Digest, bool] = {}
        """What the engine was told to have → whether it is pinned"""
        self.residency = Residency(self.policy)
        self.told: dict[str, int] = {}

    def tell_residency(self) -> None:
        """What was told in changes is all that there is."""
        for changed in self.residency.changes():
            for digest in changed.gone:
                del self.told[digest]
            self.told |= {one.digest: one.tier for one in changed.resident}
        assert self.told == {one.digest: one.tier for one in self.residency.all()}

    def tell(self, happened: Callable[..., None], *args: Any, **how: Any) -> None:
        happened(*args, **how)
        for effect in self.policy.take_effects():
            match effect:
                case effects.Release():
                    assert not effect.held.lease.released, "a lease is released once"
                    effect.held.lease.release()
                case effects.Succeed():
                    order = self.orders.pop(effect.who, None)
                    assert order is None or order.fetch.expected in ("", effect.digest), "another revision"
                    life = self.policy.get(effect.digest)
                    assert life is not None
                    assert life.held is not None
                    assert life.checked is not None or (order is not None and not order.check)
                    if order is not None and order.check:
                        assert life.proved, "a revision is ready before it is proved"
                    if order is None:
                        self.waiters.pop(effect.who)
                case effects.Fail():
                    order = self.orders.pop(effect.who, None)
                    manifest = order.manifest if order is not None else self.waiters.pop(effect.who)[1]
                    self.tells_only_of(effect.failure, manifest.partition("/")[0])
                case LoadAdapter():
                    self.engine[effect.digest] = effect.pinned
                    if effect.proof is not None:
                        self.to_prove[effect.digest] = effect.proof
                case DropAdapter():
                    self.engine.pop(effect.digest, None)
                    self.to_prove.pop(effect.digest, None)
                case effects.ForgetPartial():
                    pass
                case _:
                    self.undone.append(effect)

    def tells_only_of(self, failure: Failure, tenant: str) -> None:
        for other in TENANTS:
            assert other == tenant or f"/{other}/" not in failure.message, f"{tenant} learns of {other}: {failure}"

    def carry_out(self, effect: Any) -> None:
        self.undone.remove(effect)
        answer: effects.Answer
        if isinstance(effect, WriteSlab):
            self.tell(self.policy.slab_written, effect.number, self.write_slab(effect.layout))
            return
        if isinstance(effect, effects.Confirm):
            self.cache.touch(effect.held)
            if not effect.held.lease.is_live():
                self.tell(self.policy.vanished, effect.held)
            return
        if isinstance(effect, effects.ConfirmAll):
            self.tell(self.policy.confirmed, [held for held in effect.held if not held.lease.is_live()])
            return
        try:
            answer = self.answer(effect)
        except MotetError as error:
            answer = Failure.of(error)
        except OSError as error:
            answer = Failure("adapter_fetch_failed", str(error), 5.0)
        if isinstance(answer, Held):
            self.leases.append(answer)
        self.tell(self.policy.answered, effect.number, answer)

    def answer(self, effect: Any) -> effects.Answer:
        match effect:
            case effects.Find():
                held = self.cache.find(effect.digest, effect.request)
                return held and replace(held, certification=self.checks.earlier(held))
            case effects.Fetch():
                source = Path(effect.request.source.removeprefix("file://"))
                if effect.request.namespace in self.shared.locked_out:
                    raise credentials(f"{source} does not accept the Secret")
                if self.shared.disk_full:
                    raise OSError(errno.ENOSPC, "no space left", "the cache")
                return copy_folder(self.cache, AdapterFolder(source), effect.request, effect.before)
            case effects.Check():
                return self.checks.certify(effect.held)
            case effects.Evict():
                return self.evict(effect)
            case _:
                return self.cache.contents(effect.capacity)

    def prove(self, digest: Digest) -> None:
        """The engine does what it was ordered to do."""
        order = self.to_prove.pop(digest, None)
        if order is None:
            return
        proof = Proof(self.kernels, 1.0, 0.0)
        self.tell(self.policy.engine_proved, digest, order.number, proof)
        life = self.policy.get(digest)
        if life is not None and life.held is not None and not self.shared.disk_full:
            self.checks.keep_proof(life.held, proof)

    def write_slab(self, layout: AdapterLayout) -> int:
        if self.shared.disk_full:
            return 0
        try:
            return write_slab(layout, run_of(layout.file), LINEARS, frozenset("q"), scales=False)
        except OSError:
            return 0

    def load(self, digest: Digest) -> None:
        """As the engine does"""
        life = self.policy.get(digest)
        if life is None or not life.ready or life.checked is None or not life.checked.layout.file_unchanged():
            return
        layout, run = life.checked.layout, np.zeros(RUN_BYTES, np.uint8)
        try:
            with Slab(layout, RUN_BYTES, LINEARS) as slab:
                for part, at in slab.places():
                    slab.read(part, at, run)
            assert (run == run_of(layout.file)).all()
        except FileNotFoundError:
            self.tell(self.policy.slab_missing, digest)
        except SlabDamaged:
            remove_damaged(layout)
            self.tell(self.policy.slab_missing, digest)

    def evict(self, effect: effects.Evict) -> effects.Answer:
        if self.shared.disk_full:  # a disk that is read-only does not let anything be removed, either
            raise OSError(errno.EROFS, "read-only", "the cache")
        before = self.shared.in_use()
        gone = self.cache.evict(effect.digest, effect.held)
        assert before <= self.shared.in_use(), "an adapter in use was evicted"
        return None if gone else effect.held or Failure("adapter_fetch_failed", "another runner uses it")

    def check_consistent(self) -> None:
        """Whoever waits has an effect that will be answered, or waits for an order."""
        number_of = self.policy.pending.number_of
        for life in self.policy:
            if life.pending is not None:
                assert number_of(life) == life.pending.number, f"{life} waits for nothing"
            answers = life.pending is not None or life.digest in self.to_prove
            assert not life.orders or answers, f"{life} has orders that nothing answers"
            assert not life.waiters or not life.ready, f"{life} is ready, and requests wait for it"
            assert life.held is not None or life.pending is not None or not life.look, f"{life} is not looked for"
        for job in self.policy.jobs.values():
            assert number_of(job) is not None, f"{job} waits for nothing"


class SharedCache(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="motet-adapters-"))
        self.clock = FakeClock()
        self.disk_full = False
        self.locked_out: set[str] = set()
        self.numbers = 0
        self.digests: dict[str, Digest] = {}
        for seed, name in enumerate(REVISIONS):
            settings = {"modules_to_save": ["refused"]} if name == "refused" else {}
            self.digests[name] = adapter_digest(write_adapter(self.folder / "revisions" / name, seed=seed, **settings))
        for tenant in TENANTS:
            for name in ADAPTERS:
                self.publish(tenant, name, name)
        self.runners = [Runner(self), Runner(self)]

    def in_use(self) -> set[tuple[int, Digest]]:
        """Which runner has requests with an adapter whose folder is in its place."""
        return {
            (at, life.digest)
            for at, runner in enumerate(self.runners)
            for life in runner.policy
            if runner.users[life.digest] and life.held is not None and life.held.lease.is_live()
        }

    def publish(self, tenant: str, name: str, revision: str) -> None:
        """Files with new times, as whoever publishes writes them."""
        source = self.folder / "volumes" / tenant / name
        shutil.copytree(self.folder / "revisions" / revision, source, dirs_exist_ok=True, copy_function=shutil.copyfile)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    runner = st.sampled_from((0, 1))
    tenant = st.sampled_from(TENANTS)
    name = st.sampled_from(ADAPTERS)
    revision = st.sampled_from(REVISIONS)

    # --------------------------------------------------------------------------------------- the scheduler and requests

    @rule(at=runner, tenant=tenant, name=name, how=st.tuples(*[st.booleans()] * 4))
    def order(self, at: int, tenant: str, name: str, how: tuple[bool, ...]) -> None:
        """The revision that is ordered may be the one that the source has lost."""
        known, verified, check, newer = how
        revision = NEWER.get(name, name) if newer else name
        fetch = FetchRequest(
            source=f"file://{self.folder}/volumes/{tenant}/{name}",
            namespace=tenant,
            expected=self.digests[revision] if known else "",
            digest_verified=verified,
        )
        order = Order(self.number(), common_pb2.AdapterRef(namespace=tenant, name=name), fetch, check, load=check)
        self.runners[at].orders[order.number] = order
        self.runners[at].tell(self.runners[at].policy.order, order)

    @precondition(lambda self: any(runner.orders for runner in self.runners))
    @rule(data=st.data())
    def cancel_order(self, data: st.DataObject) -> None:
        runner = data.draw(st.sampled_from([one for one in self.runners if one.orders]))
        order = data.draw(st.sampled_from(sorted(runner.orders)))
        del runner.orders[order]
        runner.tell(runner.policy.cancel_order, order)

    @rule(at=runner, tenant=st.sampled_from((*TENANTS, "")), revision=revision)
    def wait(self, at: int, tenant: str, revision: str) -> None:
        number = self.number()
        manifest = f"{tenant}/{revision.partition(',')[0]}" if tenant else ""
        runner = self.runners[at]
        runner.waiters[number] = (self.digests[revision], manifest)
        runner.tell(runner.policy.request_waits, number, self.digests[revision], manifest)

    @precondition(lambda self: any(runner.waiters for runner in self.runners))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        runner = data.draw(st.sampled_from([one for one in self.runners if one.waiters]))
        waiter = data.draw(st.sampled_from(sorted(runner.waiters)))
        digest, _ = runner.waiters.pop(waiter)
        runner.tell(runner.policy.request_left, waiter, digest)

    @rule(at=runner, revision=revision)
    def begin_request(self, at: int, revision: str) -> None:
        runner, digest = self.runners[at], self.digests[revision]
        life = runner.policy.get(digest)
        if life is not None and life.ready:
            runner.users[digest] += 1
            runner.tell(runner.policy.use, digest)

    @rule(at=runner, revision=revision)
    def end_request(self, at: int, revision: str) -> None:
        runner, digest = self.runners[at], self.digests[revision]
        if runner.users[digest]:
            runner.users[digest] -= 1
            runner.tell(runner.policy.request_ended, digest)

    @rule(at=runner, revision=revision)
    def expect(self, at: int, revision: str) -> None:
        self.runners[at].tell(self.runners[at].policy.use, self.digests[revision], self.clock() + 2)

    @rule(at=runner, revision=revision, manifest=st.sampled_from(("", "acme/pirate", "acme/poet")))
    def drop(self, at: int, revision: str, manifest: str) -> None:
        """`manifest`: it serves another revision now."""
        self.runners[at].tell(self.runners[at].policy.drop, self.digests[revision], manifest)

    @rule(at=runner, revisions=st.sets(revision))
    def pin(self, at: int, revisions: set[str]) -> None:
        runner = self.runners[at]
        runner.pinned = frozenset(self.digests[one] for one in revisions)
        runner.tell(runner.policy.pin, runner.pinned)

    @rule(at=runner, tenant=tenant, name=name)
    def manifest_goes(self, at: int, tenant: str, name: str) -> None:
        self.runners[at].tell(self.runners[at].policy.manifest_gone, f"{tenant}/{name}")

    # ---------------------------------------------------------------------------------------------------- what happens

    @precondition(lambda self: any(runner.undone for runner in self.runners))
    @rule(data=st.data())
    def carry_out(self, data: st.DataObject) -> None:
        runner = data.draw(st.sampled_from([one for one in self.runners if one.undone]))
        runner.carry_out(runner.undone[data.draw(st.integers(0, len(runner.undone) - 1))])

    @precondition(lambda self: any(runner.undone for runner in self.runners))
    @rule()
    def carry_out_all(self) -> None:
        while any(runner.undone for runner in self.runners):
            for runner in self.runners:
                if runner.undone:
                    runner.carry_out(runner.undone[0])

    @rule(at=runner, revision=revision, on_device=st.booleans())
    def engine_has(self, at: int, revision: str, on_device: bool) -> None:
        self.runners[at].tell(self.runners[at].policy.engine_has, self.digests[revision], on_device=on_device)

    @rule(at=runner, revision=revision, in_host=st.booleans())
    def engine_keeps(self, at: int, revision: str, in_host: bool) -> None:
        self.runners[at].tell(self.runners[at].policy.engine_keeps, self.digests[revision], in_host=in_host)

    @rule(at=runner, revision=revision)
    def engine_fails(self, at: int, revision: str) -> None:
        runner, digest = self.runners[at], self.digests[revision]
        failure = Failure.of(AdapterFetchFailed("the files have changed"))
        if (order := runner.to_prove.pop(digest, None)) is not None:
            runner.tell(runner.policy.engine_proved_not, digest, order.number, failure)
        runner.tell(runner.policy.engine_failed, digest)

    @rule(at=runner, revision=revision)
    def template_is_lost(self, at: int, revision: str) -> None:
        self.runners[at].tell(self.runners[at].policy.template_lost, self.digests[revision])

    @rule(at=runner, revision=revision)
    def engine_proves(self, at: int, revision: str) -> None:
        self.runners[at].prove(self.digests[revision])

    @rule(at=runner, revision=revision)
    def engine_proves_not(self, at: int, revision: str) -> None:
        runner, digest = self.runners[at], self.digests[revision]
        if (order := runner.to_prove.pop(digest, None)) is not None:
            wrong = Failure.of(AdapterUnproved("its results are wrong"))
            runner.tell(runner.policy.engine_proved_not, digest, order.number, wrong)
            life = runner.policy.get(digest)
            assert life is None or not life.orders
            assert life is None or life.pending is not None or not life.waiters
            assert digest not in runner.to_prove, "it is not loaded again by itself"

    @rule(at=runner, kernels=st.sampled_from(KERNELS))
    def engine_changes(self, at: int, kernels: str) -> None:
        """It is told with a report."""
        runner = self.runners[at]
        runner.kernels = kernels
        runner.tell(runner.policy.kernels_serve, kernels)

    @rule(at=runner, revision=revision)
    def engine_loads(self, at: int, revision: str) -> None:
        self.runners[at].load(self.digests[revision])

    @rule(revision=revision, size=st.integers(0, 9000))
    def damage_slabs(self, revision: str, size: int) -> None:
        for path in self.runners[0].cache.path_of(self.digests[revision]).glob("slab-*"):
            path.write_bytes(path.read_bytes()[:size])

    @rule(revision=revision)
    def vanish(self, revision: str) -> None:
        shutil.rmtree(self.runners[0].cache.path_of(self.digests[revision]), ignore_errors=True)

    @rule(at=runner, revision=revision)
    def corrupt(self, at: int, revision: str) -> None:
        weights = self.runners[0].cache.path_of(self.digests[revision]) / WEIGHTS_NAME
        if weights.exists():
            weights.write_bytes(b"corrupt")
            self.engine_fails(at, revision)

    @rule(full=st.booleans())
    def fill_disk(self, full: bool) -> None:
        self.disk_full = full

    @rule(tenant=tenant, name=st.sampled_from(tuple(NEWER)), newer=st.booleans())
    def another_revision_is_published(self, tenant: str, name: str, newer: bool) -> None:
        self.publish(tenant, name, NEWER[name] if newer else name)

    @rule(tenant=tenant, refused=st.booleans())
    def expire_token(self, tenant: str, refused: bool) -> None:
        (self.locked_out.add if refused else self.locked_out.discard)(tenant)

    @rule(seconds=st.sampled_from((1, 10, 1000)))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for runner in self.runners:
            runner.tell(runner.policy.tick)

    # ------------------------------------------------------------------------------------------------ what always holds

    @invariant()
    def all_who_wait_have_something_to_come(self) -> None:
        for runner in self.runners:
            runner.check_consistent()

    @invariant()
    def the_scheduler_knows_what_is_resident(self) -> None:
        for runner in self.runners:
            runner.tell_residency()

    @invariant()
    def the_engine_knows_what_is_pinned(self) -> None:
        for runner in self.runners:
            for life in runner.policy:
                if life.in_engine and life.checked is not None and life.pending is None and not life.drop_when_idle:
                    assert runner.engine[life.digest] is (life.digest in runner.pinned)

    @invariant()
    def what_is_held_is_locked(self) -> None:
        for runner in self.runners:
            for life in runner.policy:
                assert life.held is None or not life.held.lease.released

    def teardown(self) -> None:
        try:
            self.disk_full = False
            self.locked_out = set()
            self.carry_out_all()
            self.time_passes(1000.0)
            self.carry_out_all()
            while any(runner.orders and runner.to_prove for runner in self.runners):
                for runner in self.runners:
                    for digest in list(runner.to_prove):
                        runner.prove(digest)
                self.carry_out_all()
            self.time_passes(1.0)  # what was dropped while its proof was awaited goes then
            self.carry_out_all()
            for runner in self.runners:
                self.check_settled(runner)
        finally:
            for runner in self.runners:
                for held in runner.leases:
                    held.lease.release()
            shutil.rmtree(self.folder)

    @staticmethod
    def check_settled(runner: Runner) -> None:
        assert not runner.policy.pending.askers
        assert not runner.orders, "an order has no answer"
        for digest, _ in runner.waiters.values():
            life = runner.policy.get(digest)
            assert life is not None
            assert not life.ready, "a request waits for what is there"
        held = [life.held for life in runner.policy if life.held is not None]
        assert all(one.lease.is_live() for one in held), "a lease of a folder that has gone"
        assert runner.policy.slab_under_way is None, "a slab is never written"
        unreleased = {id(one.lease) for one in runner.leases if not one.lease.released}
        assert unreleased == {id(one.lease) for one in held}, "a lease that nobody holds"
        for life in runner.policy:
            assert not (life.drop_when_idle and life.idle and not runner.users[life.digest]), "it was dropped"


TestSharedCache = SharedCache.TestCase
TestSharedCache.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


class Told:
    """A policy, and the effects of what it is told."""

    def __init__(
        self, capacity: int = 9, limits: CacheLimits | None = None, users_of: Callable[[Digest], int] = lambda _: 0
    ) -> None:
        self.clock = FakeClock()
        self.policy = AdapterPolicy(
            limits=limits or CacheLimits(capacity), users_of=users_of, clock=self.clock, failures=SourceFailures()
        )

    def __getattr__(self, happened: str) -> Callable[..., list[Any]]:
        def tell(*args: Any, **more: Any) -> list[Any]:
            getattr(self.policy, happened)(*args, **more)
            return self.policy.take_effects()

        return tell


def test_a_folder_whose_load_failed_is_checked_again_if_an_order_finds_it_first() -> None:
    """The look that the failure has begun answers later: nothing of before the failure counts meanwhile."""
    told = Told()
    held = Held(DIGEST, 1, (1, 1), None, CERTIFIED)
    (find,) = told.order(an_order(1))
    assert effects.Succeed(1, DIGEST) in told.answered(find.number, held)
    told.engine_failed(DIGEST)
    (find,) = told.order(an_order(2))
    done = told.answered(find.number, replace(held, certification=None))
    assert kinds(done) == [effects.Release, effects.Check]


def test_an_adapter_whose_template_is_lost_is_checked_once_and_then_serves() -> None:
    told = Told()
    held = Held(DIGEST, 1, (1, 1), None, CERTIFIED)
    (find,) = told.order(an_order(1))
    told.answered(find.number, held)
    (check,) = told.template_lost(DIGEST)
    assert isinstance(check, effects.Check)
    assert told.template_lost(DIGEST) == []
    assert not told.policy.get(DIGEST).ready
    told.answered(check.number, held.certification)
    assert told.policy.get(DIGEST).ready


@pytest.mark.parametrize("looks", ["vanished", "load failed", "checked again"])
@pytest.mark.parametrize("pinned", [True, False])
def test_the_engine_is_told_after_a_look_at_the_folder_what_was_pinned_meanwhile(looks: str, pinned: bool) -> None:
    told = Told()
    held = Held(DIGEST, 1, (1, 1), None, CERTIFIED)
    told.pin(frozenset() if pinned else {DIGEST})
    (find,) = told.order(an_order(1))
    (load,) = [one for one in told.answered(find.number, held) if isinstance(one, LoadAdapter)]
    told.engine_has(DIGEST, on_device=True)
    *_, find = told.engine_failed(DIGEST) if looks == "load failed" else told.vanished(held)
    if looks == "load failed":
        told.engine_has(DIGEST, on_device=True)
    now = frozenset({DIGEST} if pinned else ())
    assert told.pin(now) == [], "the engine is told nothing of files that are not known to be the checked ones"
    if looks == "checked again":
        done = told.order(an_order(2))
        done = told.answered(done[0].number, replace(held, inode=(1, 2), certification=None))
        assert not any(isinstance(one, LoadAdapter) for one in done)
        done = told.answered(done[-1].number, held.certification)
    else:
        done = told.answered(find.number, replace(held, inode=(1, 2)))
    loads = [one for one in done if isinstance(one, LoadAdapter)]
    assert (load.pinned, [one.pinned for one in loads]) == (not pinned, [pinned])
    assert told.pin(now) == []


def test_what_was_pinned_while_an_adapter_was_to_be_dropped_is_told_once_it_stays() -> None:
    told = Told(users_of=lambda _: 1)
    (find,) = told.order(an_order(1))
    certified = CERTIFIED
    told.answered(find.number, Held(DIGEST, 1, (1, 1), None, certified))
    told.engine_has(DIGEST, on_device=True)
    told.drop(DIGEST)
    assert told.pin({DIGEST}) == []
    assert [one.pinned for one in told.use(DIGEST) if isinstance(one, LoadAdapter)] == [True]


DIGEST = Digest("sha256:" + "a" * 64)
CERTIFIED = Certification.of(scheduler_pb2.Certificate(), AdapterLayout.of(Path("nowhere"), FileStamp(0, 0, 0), 4, ()))


def an_order(number: int, source: str = "https://acme/", expected: str = DIGEST) -> Order:
    ref = common_pb2.AdapterRef(namespace="acme", name=f"a{number}")
    return Order(number, ref, fetch(source, expected=expected), load=True)


def kinds(done: list[Any]) -> list[type]:
    return [type(effect) for effect in done]


def test_an_adapter_whose_eviction_fails_stays_with_its_lease() -> None:
    told = Told(capacity=0)
    held = Held(DIGEST, 1, (1, 1), None, CERTIFIED)
    (find,) = told.order(an_order(1))
    *_, listing = told.answered(find.number, held)
    told.answered(listing.number, CacheContents((Cached(DIGEST),)))  # the one that was ordered just now is spared
    other = Digest("sha256:" + "b" * 64)
    (find,) = told.order(an_order(2, expected=other))
    *_, listing = told.answered(find.number, replace(held, digest=other, inode=(1, 2)))
    (evict,) = told.answered(listing.number, CacheContents((Cached(DIGEST), Cached(other))))
    assert evict.held == held
    told.answered(evict.number, Failure("internal", "it fails"))
    life = told.policy.get(DIGEST)
    assert life is not None
    assert life.held == held


def test_thousands_of_folders_are_looked_at_in_a_few_calls_one_after_the_other() -> None:
    told = Told(capacity=2000)
    digests = [Digest(f"sha256:{number:064}") for number in range(1200)]
    for number, digest in enumerate(digests):
        (find,) = told.order(an_order(number, expected=digest))
        held = Held(digest, 1, (1, number), None, CERTIFIED)
        told.answered(find.number, held)
    (first,) = told.tick()
    assert told.tick() == [], "the disk is slow"
    looked = [first]
    told.drop(digests[-1])
    while done := told.confirmed([]):
        looked += done
    assert [len(effect.held) for effect in looked] == [500, 500, 199]
    assert [one.digest for effect in looked for one in effect.held] == digests[:-1]
    assert told.tick() == [first], "the next round"


def test_an_adapter_that_is_dropped_during_its_check_is_not_loaded_and_soon_forgotten() -> None:
    told = Told()
    (find,) = told.order(an_order(1))
    (check,) = told.answered(find.number, Held(DIGEST, 1, (1, 1), None))
    told.drop(DIGEST)
    done = told.answered(check.number, CERTIFIED)
    assert kinds(done) == [effects.Succeed, effects.ListCache]
    assert effects.Release in kinds(told.tick())
    assert told.policy.get(DIGEST) is None


def test_who_comes_during_a_fetch_that_fails_gets_a_fetch_of_what_is_there_then() -> None:
    told = Told()
    (first,) = told.order(an_order(1, "file:/a", ""))
    assert told.order(an_order(2, "file:/a", "")) == []
    done = told.answered(first.number, Failure("adapter_fetch_failed", "no config"))
    assert [effect.who for effect in done if isinstance(effect, effects.Fail)] == [1]
    (second,) = (effect for effect in done if isinstance(effect, effects.Fetch))
    done = told.answered(second.number, Failure("adapter_fetch_failed", "no config"))
    assert [effect.who for effect in done] == [2]


@pytest.mark.parametrize(
    ("source", "how", "again"),
    [
        ("s3://models/a", {}, True),
        ("https://acme/", {}, True),
        ("oci://acme/a:v1", {}, True),
        ("hf://acme/a", {"revision": "main"}, True),
        ("hf://acme/a", {"revision": "0" * 40}, False),
        (f"oci://acme/a@sha256:{'0' * 64}", {}, False),
        ("https://acme/", {"expected": DIGEST}, False),
    ],
)
def test_a_newer_generation_gets_what_its_source_has_now(source: str, how: dict[str, str], again: bool) -> None:
    """The files may have been replaced since the fetch for the earlier one began."""

    def ordered(number: int, generation: int, name: str = "a") -> list[Any]:
        ref = common_pb2.AdapterRef(namespace="acme", name=name, generation=generation)
        done = told.order(Order(number, ref, fetch(source, digest_verified=False, **how), load=True))
        for find in [one for one in done if isinstance(one, effects.Find)]:
            done += told.answered(find.number, None)
        return [one for one in done if isinstance(one, effects.Fetch)]

    told = Told()
    (first,) = ordered(1, 1)
    for number, generation in ((2, 1), (3, 2), (4, 2)):
        assert ordered(number, generation) == []
    done = told.answered(first.number, Failure("adapter_fetch_failed", "no config"))
    assert [one.who for one in done if isinstance(one, effects.Fail)] == ([1, 2] if again else [1, 2, 3, 4])
    assert [type(one) for one in done if isinstance(one, effects.Fetch)] == [effects.Fetch] * again


def test_the_revision_that_serves_and_the_one_that_is_wanted_do_not_disturb_each_others_fetches() -> None:
    told, gone = Told(), []

    def forgotten(done: list[Any]) -> list[Any]:
        gone.extend(one.request.revision for one in done if isinstance(one, effects.ForgetPartial))
        return done

    def fails(number: int, revision: str, *, serves: bool) -> float:
        """Returns after which time it is tried again."""
        it = fetch("hf://acme/a", revision=revision, digest_verified=serves)
        done = forgotten(told.order(Order(number, common_pb2.AdapterRef(namespace="acme", name="a"), it)))
        (begun,) = [one for one in done if isinstance(one, effects.Fetch)]
        done = told.answered(begun.number, Failure("adapter_fetch_failed", "away", 5.0))
        (failed,) = [one for one in done if isinstance(one, effects.Fail)]
        told.clock.advance(failed.failure.retry_after)
        return failed.failure.retry_after

    waits = [(fails(2 * turn, "v1", serves=True), fails(2 * turn + 1, "v2", serves=False)) for turn in range(3)]
    assert waits == [(5, 5), (10, 10), (20, 20)]
    assert gone == []
    fails(6, "v3", serves=False)
    assert gone == ["v2"]
    fails(7, "v3", serves=True)
    assert gone == ["v2", "v1"]
    forgotten(told.manifest_gone("acme/a"))
    assert {*gone} == {"v1", "v2", "v3"}


def digest_of(number: int) -> Digest:
    return Digest(f"sha256:{number:064x}")


def to_fetch(number: int, namespace: str = "many") -> Order:
    ref = common_pb2.AdapterRef(namespace=namespace, name=f"a{number}")
    request = fetch(f"file:/{number}", namespace=namespace, expected=digest_of(number), digest_verified=False)
    return Order(number, ref, request, load=True)


def checks_of(told: Told, number: int, namespace: str = "many", inode: int = 1) -> list[effects.Check]:
    """That begin when an order has its folder"""
    (find,) = told.order(to_fetch(number, namespace))
    return checks_in(told.answered(find.number, Held(digest_of(number), 1, (inode, number), None)))


def checks_in(done: list[Any]) -> list[effects.Check]:
    return [effect for effect in done if isinstance(effect, effects.Check)]


def test_a_fetch_says_whether_a_request_waits_for_it() -> None:
    told = Told()
    told.use(digest_of(1), 1e9)  # it was announced
    for number, awaited in ((1, True), (2, False)):
        (find,) = [one for one in told.order(to_fetch(number)) if isinstance(one, effects.Find)]
        done = told.answered(find.number, None)
        assert [one.awaited for one in done if isinstance(one, effects.Fetch)] == [awaited]


def test_checks_of_a_namespace_leave_a_thread_to_others() -> None:
    told = Told(capacity=99)
    assert MAX_CHECKS < FILE_THREADS
    begun = [one for number in range(6) for one in checks_of(told, number)]
    assert len(begun) == MAX_CHECKS
    assert len(checks_of(told, 100, "few")) == 1
    checked = []
    while begun:
        one = begun.pop(0)
        checked.append(one.held.digest)
        begun += checks_in(told.answered(one.number, Failure("adapter_incompatible", "no")))
        assert len(begun) <= MAX_CHECKS
    assert checked == [digest_of(number) for number in range(6)]


def test_what_a_request_waits_for_is_checked_before_what_nobody_waits_for() -> None:
    told = Told(capacity=99)
    (first, *_) = [one for number in range(MAX_CHECKS + 3) for one in checks_of(told, number)]
    told.request_waits(1000, digest_of(MAX_CHECKS + 2), f"many/a{MAX_CHECKS + 2}")
    done = told.answered(first.number, Failure("adapter_incompatible", "no"))
    assert [one.held.digest for one in checks_in(done)] == [digest_of(MAX_CHECKS + 2)]


def test_a_check_that_nobody_expects_any_more_does_not_begin() -> None:
    """Its folder was replaced while it waited for its turn."""
    told = Told(capacity=99)
    begun = [one for number in range(MAX_CHECKS + 2) for one in checks_of(told, number)]
    assert checks_of(told, MAX_CHECKS, inode=2) == []
    inodes = []
    for one in begun:
        done = told.answered(one.number, Failure("adapter_incompatible", "no"))
        inodes += [each.held.inode for each in checks_in(done)]
    assert inodes == [(1, MAX_CHECKS + 1), (2, MAX_CHECKS)]


def fetch(source: str, **how: Any) -> FetchRequest:
    return FetchRequest(source=source, namespace=how.pop("namespace", "acme"), **how)


def test_a_stranger_cannot_make_others_failures_be_forgotten_nor_the_memory_grow():
    failures = SourceFailures()
    failure = Failure("adapter_fetch_failed", "away", 5.0)
    failures.note(fetch("https://zeta/", namespace="zeta"), failure, 0.0)
    for n in range(3 * MAX_PER_NAMESPACE):
        failures.note(fetch(f"https://acme/{n}/"), failure, 0.0)
    assert len(failures) == MAX_PER_NAMESPACE + 1
    assert failures.blocking(fetch("https://zeta/", namespace="zeta"), 1.0)
    assert not failures.blocking(fetch("https://acme/0/"), 1.0)
    failures.expire(10_000.0)
    assert len(failures) == 0


def test_the_time_until_the_next_attempt_doubles():
    failures = SourceFailures()
    failure = Failure("adapter_fetch_failed", "away", 5.0)
    waits = [failures.note(fetch("https://acme/"), failure, 0.0).retry_after for _ in range(9)]
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    failures.forget(fetch("https://acme/"))
    assert failures.note(fetch("https://acme/"), failure, 0.0).retry_after == 5
