"""A revision is ready once the engine has proved it; the proof is kept, and only what was proved is believed."""

import asyncio
import errno
import threading
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.domain import Digest
from motet.errors import (
    AdapterError,
    AdapterFetchFailed,
    AdapterIncompatible,
    AdapterUnproved,
    Internal,
    MotetError,
    Overloaded,
)
from motet_runner.adapters import kept_proofs
from motet_runner.adapters.compatibility_check import CHECK_VERSION
from motet_runner.adapters.kept_proofs import MAX_KERNELS, MAX_PROOF_FILES, ProofKey
from motet_runner.adapters.policy import adapter_policy
from motet_runner.adapters.policy.adapter_policy import PROVE_AGAIN_SECONDS
from motet_runner.adapters.policy.proof_orders import MAX_AGAIN
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.engine_messages import DropAdapter, LoadAdapter
from motet_runner.interface import AdapterFailed, AdapterLoaded, ProofEnded
from tests.common.waiting import until
from tests.runner_service.test_registry import BASE_DIGEST, RegistrySetup
from tests.support.adapter_fetches import settle
from tests.support.in_process_runner import write_adapter

DEVICE = common_pb2.ADAPTER_STAGE_DEVICE


class Proving(RegistrySetup):
    """The test is the engine."""

    def __init__(self, folder: Path, kernels: str | None = "torch", **more) -> None:
        super().__init__(folder, proves_with=kernels, **more)
        self.kernels = kernels

    def order(self, n: int, stage=common_pb2.ADAPTER_STAGE_CERTIFIED, *, builds=(), **config) -> asyncio.Task:
        source = write_adapter(self.folder / f"a{n}", seed=n, **config)
        ref = common_pb2.AdapterRef(namespace="default", name=f"a{n}")
        order = scheduler_pb2.EnsureAdapter(adapter=ref, source=source.as_uri(), stage=stage, proved_builds=builds)
        return asyncio.create_task(self.adapters.ensure(order))

    async def asked(self) -> LoadAdapter:
        """The engine's order to prove an adapter, once it comes"""
        await until(lambda: any(isinstance(one, LoadAdapter) for one in self.posted), every=0.001)
        await settle(self.adapters)
        asked = [one for one in self.posted if isinstance(one, LoadAdapter)][-1]
        assert asked.proof is not None
        return asked

    async def proves(self, asked: LoadAdapter, moved: float = 1.0, composition: float = 0.0) -> None:
        await self.answers(asked, Proof(self.kernels, moved, composition))

    async def answers(self, asked: LoadAdapter, found: Proof | MotetError):
        life = self.adapters.on_proof_ended(ProofEnded(asked.proof.number, asked.digest, found))
        await settle(self.adapters)
        return life

    async def proved(self, n: int, **config):
        order = self.order(n, **config)
        await self.proves(await self.asked())
        self.posted.clear()
        return await order


@pytest.fixture
def setup(tmp_path):
    setup = Proving(tmp_path)
    yield setup
    setup.adapters.close()


async def test_an_order_is_answered_once_the_engine_has_proved_the_adapter(setup):
    order = setup.order(1)
    asked = await setup.asked()
    assert not asked.proof.serves_meanwhile
    setup.adapters.on_loaded(AdapterLoaded(asked.digest, 10, 0.1))
    await settle(setup.adapters)
    assert not order.done()
    await setup.proves(replace(asked, proof=ProofOrder(99)))
    assert not order.done(), "the answer is to another order"
    await setup.proves(asked)
    life = await order
    assert life.digest == asked.digest
    assert life.certificate.max_delta_to_base == 1.0
    assert not life.certificate.warnings


async def test_requests_need_not_wait_here_for_a_proof(setup):
    """The engine proves what it loads before it serves, and says meanwhile that it loads."""
    setup.order(1)
    asked = await setup.asked()
    life = setup.adapters.for_request(asked.digest)
    assert life is not None
    assert setup.posted[-1] == asked


async def test_an_adapter_that_hardly_acts_is_certified_with_a_warning(setup):
    order = setup.order(1)
    await setup.proves(await setup.asked(), moved=1e-5, composition=1e-4)
    assert "hardly changes anything" in (await order).certificate.warnings[0]


async def test_what_is_not_proved_is_refused_and_the_former_revision_stays(setup):
    before = await setup.proved(1)
    order = setup.order(1, r=8)
    asked = await setup.asked()
    digest = asked.digest
    assert digest != before.digest
    waiting = asyncio.create_task(setup.adapters.wait_for(digest))
    await asyncio.sleep(0)
    told = await setup.answers(asked, AdapterUnproved("wrong", reason="ProofFailed"))
    with pytest.raises(AdapterUnproved) as refused:
        await order
    assert refused.value.reason == "ProofFailed"
    assert told is not None
    assert DropAdapter(digest) in setup.posted, "the engine forgets it"
    assert setup.adapters.get(digest) is None
    assert setup.adapters.for_request(before.digest) is before
    await asyncio.wait([waiting], timeout=0)
    waiting.cancel()
    again = setup.order(1, r=8)
    setup.posted.clear()
    asked = await setup.asked()
    assert asked.digest == digest, "whoever orders it again has it proved again"
    await setup.proves(asked)
    assert (await again).digest == digest


async def test_a_proof_that_is_given_up_fails_the_order_and_not_the_bytes(setup):
    order = setup.order(1)
    asked = await setup.asked()
    digest = asked.digest
    await setup.answers(asked, Overloaded("no memory"))
    setup.adapters.on_failed(AdapterFailed(digest, Overloaded("no memory")))
    with pytest.raises(Overloaded):
        await order
    await settle(setup.adapters)
    assert setup.adapters.get(digest) is not None
    setup.posted.clear()
    setup.adapters.for_request(digest)
    again = await setup.asked()
    assert again.proof.number > asked.proof.number, "the next request has it proved"


@pytest.mark.parametrize(
    "error",
    [
        AdapterError("The runner could not load the adapter: [Errno 5] Input/output error"),
        AdapterFetchFailed("in 60 s, the disk has read nothing"),
        Internal("a defect"),
    ],
)
async def test_a_proof_that_is_given_up_is_tried_again(setup, error):
    """The first two are those of `adapter_uploads`, the third is any that `EngineLoop` catches."""
    order = setup.order(1)
    asked = await setup.asked()
    await setup.answers(asked, error)
    setup.adapters.on_failed(AdapterFailed(asked.digest, error))
    with pytest.raises(MotetError) as given_up:
        await order
    assert (given_up.value.code, given_up.value.retry_after) == (error.code, PROVE_AGAIN_SECONDS)
    setup.posted.clear()
    again = setup.order(1)
    await setup.proves(await setup.asked())
    assert (await again).digest == asked.digest


@pytest.mark.parametrize(
    ("error", "retry_after"),
    [
        (AdapterUnproved("wrong", reason="ProofFailed"), 0.0),
        (AdapterIncompatible("too large", reason="RankTooLarge"), 0.0),
        (Overloaded("no memory", retry_after=7.0), 7.0),
    ],
)
async def test_what_is_final_is_not_tried_again_and_the_engines_own_time_counts(setup, error, retry_after):
    order = setup.order(1)
    await setup.answers(await setup.asked(), error)
    with pytest.raises(MotetError) as failed:
        await order
    assert (failed.value.code, failed.value.retry_after) == (error.code, retry_after)


async def test_an_order_that_is_taken_back_while_its_proof_is_awaited_gets_no_answer(setup):
    order = setup.order(1)
    asked = await setup.asked()
    order.cancel()
    await settle(setup.adapters)
    assert not setup.adapters.get(asked.digest).orders
    await setup.proves(asked)
    assert (await setup.order(1)).digest == asked.digest


async def test_an_order_for_what_is_dropped_meanwhile_is_proved_and_answered(setup, monkeypatch):
    checks, check = asyncio.Event(), setup.files.check

    async def slow(held):
        checks.set()
        await asyncio.sleep(0.05)
        return await check(held)

    monkeypatch.setattr(setup.files, "check", slow)
    order = setup.order(1)
    await checks.wait()
    (life,) = setup.adapters.policy
    setup.adapters.policy.drop(life.digest)
    await setup.proves(await setup.asked())
    assert (await order).digest == life.digest


async def test_a_restart_proves_nothing_anew(setup, tmp_path):
    first = await setup.proved(1)
    setup.adapters.close()
    again = Proving(tmp_path)
    life = await again.order(1)
    assert (life.digest, again.posted) == (first.digest, [])
    assert life.certificate.max_delta_to_base == 1.0
    assert again.adapters.for_request(life.digest) is life
    again.adapters.tick()
    await settle(again.adapters)
    assert again.posted == [LoadAdapter(life.digest, life.checked.layout)]
    again.adapters.close()


@pytest.mark.parametrize(
    "change",
    [
        {"kernels": "cpp"},
        {"base": Digest("sha256:" + "c" * 64)},
        {"engine": "bfloat16"},
        {"version": "2"},
        {"checker": CHECK_VERSION + 1},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_after_a_change_an_adapter_serves_on_and_is_proved_again(setup, tmp_path, change):
    first = await setup.proved(1)
    setup.adapters.close()
    changed = Proving(tmp_path, **change)
    life = await changed.order(1)
    assert life.digest == first.digest
    assert changed.posted == [], "nobody waits for the proof"
    changed.adapters.tick()
    asked = await changed.asked()
    assert asked.proof.serves_meanwhile
    assert changed.adapters.for_request(first.digest) is life
    changed.posted.clear()
    await changed.proves(asked)
    changed.adapters.tick()
    await settle(changed.adapters)
    assert changed.posted == [], "it is proved once"
    changed.adapters.close()
    back = Proving(tmp_path, **change)
    await back.order(1)
    back.adapters.tick()
    await settle(back.adapters)
    assert back.posted == []
    back.adapters.close()


async def test_a_request_for_what_is_proved_again_brings_the_order_with_its_load(setup, tmp_path):
    first = await setup.proved(1)
    setup.adapters.close()
    compiled = Proving(tmp_path, "cpp")
    await compiled.order(1)
    compiled.adapters.expect(first.digest, 10.0)
    assert (await compiled.asked()).proof.serves_meanwhile
    compiled.adapters.close()


async def test_other_kernels_prove_all_again_a_few_at_a_time(tmp_path):
    setup = Proving(tmp_path, capacity=8)
    proved = {(await setup.proved(n)).digest for n in range(4)}
    setup.adapters.on_kernels("cpp")
    asked = list(setup.posted)
    assert len(asked) == MAX_AGAIN
    setup.kernels = "cpp"
    while asked:
        one = asked.pop(0)
        before = len(setup.posted)
        await setup.proves(one)
        assert one.digest in proved
        proved.discard(one.digest)
        asked += setup.posted[before:]
        assert len(asked) <= MAX_AGAIN
    assert not proved
    setup.adapters.on_kernels("torch")
    assert len(setup.posted) == 4, "these have proved all before"
    setup.adapters.close()


async def test_a_later_proof_that_fails_takes_the_adapter_out_of_service_and_is_told(setup, tmp_path):
    life = await setup.proved(1)
    setup.adapters.on_kernels("cpp")
    (asked,) = setup.posted
    told = await setup.answers(asked, AdapterUnproved("wrong", reason="ProofFailed"))
    assert [ref.name for ref in told.refs] == ["a1"]
    assert DropAdapter(life.digest) in setup.posted
    assert setup.adapters.for_request(life.digest) is None
    setup.adapters.close()
    again = Proving(tmp_path)
    order = again.order(1)
    assert not (await again.asked()).proof.serves_meanwhile, "what it was proved by before does not count any more"
    assert not order.done()
    again.adapters.close()


async def test_a_later_proof_that_is_given_up_is_ordered_again_later(setup):
    life = await setup.proved(1)
    setup.adapters.on_kernels("cpp")
    (asked,) = setup.posted
    await setup.answers(asked, Overloaded("no memory"))
    assert setup.adapters.for_request(life.digest) is life
    setup.adapters.tick()
    await settle(setup.adapters)
    assert len([one for one in setup.posted if isinstance(one, LoadAdapter) and one.proof != asked.proof]) >= 1


@pytest.mark.parametrize(
    "forge",
    [
        lambda _: b"",
        lambda _: b"[]",
        lambda _: b'{"key": 1, "proofs": [], "sum": null}',
        lambda _: b"[" * 100_000,
        lambda kept: kept.replace(b"torch", b"cpp, "),
        lambda kept: kept[:-9],
        lambda _: ProofKey(BASE_DIGEST, "", "tile 8", "motet", "cpu", "1").encode(
            Digest("sha256:" + "d" * 64), "layout", [Proof("torch", 1.0, 0.0)]
        ),
        lambda kept: orjson.dumps(orjson.loads(kept) | {"proofs": '[["torch",1.0,0.0],["cpp",1.0,0.0]]'}),
    ],
)
async def test_a_forged_or_damaged_proof_is_not_believed(setup, tmp_path, forge):
    first = await setup.proved(1)
    setup.adapters.close()
    (kept,) = first.held.folder.glob("proofs-*.json")
    kept.write_bytes(forge(kept.read_bytes()))
    again = Proving(tmp_path)
    order = again.order(1)
    asked = await again.asked()
    assert not asked.proof.serves_meanwhile
    await again.proves(asked)
    await order
    again.adapters.close()


async def test_what_only_vllm_has_proved_does_not_serve_before_its_linears_are(tmp_path):
    behind = Proving(tmp_path, backend="vllm")
    await behind.proved(1)
    behind.adapters.close()
    ours = Proving(tmp_path)
    order = ours.order(1)
    asked = await ours.asked()
    assert not asked.proof.serves_meanwhile
    await ours.proves(asked)
    await order
    ours.adapters.close()


async def test_a_proof_is_for_one_adapter(setup, tmp_path):
    first, second = await setup.proved(1), None
    order = setup.order(2)
    second = (await setup.asked()).digest
    (of_first,) = first.held.folder.glob("proofs-*.json")
    setup.adapters.close()
    order.cancel()
    again = Proving(tmp_path)
    for name in (of_first.name, next(iter(_names(again, second)))):
        (again.cache.path_of(second) / name).write_bytes(of_first.read_bytes())
    again.order(2)
    assert not (await again.asked()).proof.serves_meanwhile
    again.adapters.close()


def _names(setup: Proving, digest: Digest) -> list[str]:
    checked = setup.files.checks.earlier(setup.cache.find(digest))
    return [ProofKey(BASE_DIGEST, "", "tile 8", "motet", "cpu", "1").file_name(digest, checked.layout.linears_file)]


async def test_a_disk_that_takes_no_proof_costs_only_another_proof(setup, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    order = setup.order(1)
    asked = await setup.asked()
    digest = asked.digest
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        await setup.proves(asked)
    await order
    setup.adapters.close()
    again = Proving(tmp_path)
    again.order(1)
    assert (await again.asked()).digest == digest
    again.adapters.close()


async def test_proofs_of_many_engines_and_kernels_are_bounded(setup, tmp_path):
    first = await setup.proved(1)
    for number in range(MAX_KERNELS + 3):
        setup.kernels = f"kernels {number}"
        setup.posted.clear()
        setup.adapters.on_kernels(setup.kernels)
        await setup.proves(await setup.asked())
    setup.adapters.close()
    for number in range(MAX_PROOF_FILES + 3):
        one = Proving(tmp_path, version=f"version {number}")
        await one.order(1)
        one.adapters.tick()
        await one.proves(await one.asked())
        one.adapters.close()
    assert len(list(first.held.folder.glob("proofs-*.json"))) == MAX_PROOF_FILES
    newest = Proving(tmp_path, version=f"version {MAX_PROOF_FILES + 2}")
    await newest.order(1)
    newest.adapters.close()


async def test_a_folder_that_goes_while_its_proof_is_awaited_is_fetched_again(setup):
    order = setup.order(1)
    asked = await setup.asked()
    setup.posted.clear()
    held = setup.adapters.get(asked.digest).held
    setup.files.cache._discard(held.folder)  # noqa: SLF001 - as another runner does it
    setup.adapters.tick()
    again = await setup.asked()
    assert again.digest == asked.digest
    assert again.proof.number > asked.proof.number, "of other files"
    await setup.proves(asked)
    assert not order.done()
    await setup.proves(again)
    assert (await order).held.inode != held.inode


async def test_what_is_remembered_as_wrong_is_bounded(setup, monkeypatch):
    monkeypatch.setattr(adapter_policy, "MAX_REFUSED", 2)
    digests = []
    for n in range(3):
        order = setup.order(n)
        asked = await setup.asked()
        digests.append(asked.digest)
        await setup.answers(asked, AdapterUnproved("wrong", reason="ProofFailed"))
        with pytest.raises(AdapterUnproved):
            await order
        setup.posted.clear()
    assert list(setup.adapters.policy.refused) == digests[1:]
    assert not setup.adapters.policy.knows_all_refused


async def test_an_engine_that_proves_nothing_serves_as_before(tmp_path):
    setup = RegistrySetup(tmp_path)
    life = await setup.ensure(1, DEVICE)
    assert setup.posted == [LoadAdapter(life.digest, life.checked.layout)]
    setup.adapters.on_kernels("any")
    assert setup.adapters.policy.proofs.kernels is None
    setup.adapters.close()


async def test_a_runner_does_not_believe_its_neighbour_what_it_has_found_wrong_itself(setup, tmp_path):
    """They share the folder, and all that a proof depends on."""
    neighbour = Proving(tmp_path)
    order = setup.order(1)
    asked = await setup.asked()
    await setup.answers(asked, AdapterUnproved("wrong", reason="ProofFailed"))
    with pytest.raises(AdapterUnproved):
        await order
    await neighbour.proved(1)
    setup.posted.clear()
    setup.adapters.expect(asked.digest, 10.0)
    again = await setup.asked()
    assert not again.proof.serves_meanwhile
    setup.posted.clear()
    await setup.proves(again)
    assert setup.adapters.for_request(asked.digest).proved_by == ("torch",)
    neighbour.adapters.close()


async def test_a_proof_that_a_slow_disk_keeps_late_hides_no_newer_one_that_has_failed(setup, tmp_path):
    neighbour = Proving(tmp_path)
    order = setup.order(1)
    asked = await setup.asked()
    disk_answers = threading.Event()
    setup.files.folders.submit(disk_answers.wait)
    setup.adapters.on_proof_ended(ProofEnded(asked.proof.number, asked.digest, Proof("torch", 1.0, 0.0)))
    await order
    setup.posted.clear()
    setup.adapters.on_kernels("cpp")
    again = [one for one in setup.posted if isinstance(one, LoadAdapter)][-1]
    wrong = AdapterUnproved("wrong", reason="ProofFailed")
    setup.adapters.on_proof_ended(ProofEnded(again.proof.number, again.digest, wrong))
    await asyncio.sleep(0)  # it is noted, while the disk keeps the first one waiting
    disk_answers.set()
    await settle(setup.adapters)
    await neighbour.proved(1)
    setup.posted.clear()
    setup.adapters.expect(asked.digest, 10.0)
    assert not (await setup.asked()).proof.serves_meanwhile
    neighbour.adapters.close()


@pytest.mark.parametrize("kernels", ["torch", "cpp"])
async def test_what_another_machine_or_device_has_proved_does_not_serve_here_before_it_is_proved(tmp_path, kernels):
    here, there = {"hardware": "one, GPU-1"}, {"kernels": kernels, "hardware": "one, GPU-2"}
    one, other = Proving(tmp_path, **here), Proving(tmp_path, **there)
    await one.proved(1)
    order = other.order(1)
    asked = await other.asked()
    assert not asked.proof.serves_meanwhile
    await other.proves(asked)
    await order
    for setup, how in ((one, here), (other, there)):
        setup.adapters.close()
        again = Proving(tmp_path, **how)
        await again.order(1)
        assert not again.posted, "each believes what it has proved itself"
        again.adapters.close()


async def test_runners_that_share_a_folder_keep_their_own_proofs(tmp_path):
    runners = [Proving(tmp_path, machine=f"pod {number}") for number in range(MAX_PROOF_FILES + 2)]
    for one in runners:
        await one.proved(1)
        one.adapters.close()
    wrong = Proving(tmp_path, machine="pod 0")
    await wrong.order(1)
    wrong.adapters.on_kernels("cpp")
    await wrong.answers(await wrong.asked(), AdapterUnproved("wrong", reason="ProofFailed"))
    wrong.adapters.close()
    for number in range(1, len(runners)):
        again = Proving(tmp_path, machine=f"pod {number}")
        life = await again.order(1)
        assert life.proved_by == ("torch",)
        again.adapters.close()


async def test_proofs_of_many_machines_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_proofs, "MAX_FILES_OF_ALL", 3)
    for number in range(5):
        one = Proving(tmp_path, machine=f"pod {number}")
        life = await one.proved(1)
        one.adapters.close()
    assert len(list(life.held.folder.glob("proofs-*.json"))) == 3
    newest = Proving(tmp_path, machine="pod 4")
    assert (await newest.order(1)).proved_by == ("torch",)
    newest.adapters.close()


SAME = {"hardware": "H200", "version": "1"}


@pytest.mark.parametrize(
    ("differs", "serves"),
    [
        ({}, True),
        ({"hardware": "H100"}, False),
        ({"version": "2"}, False),
        ({"engine": "float16"}, False),
        ({"kernels": "cpp"}, False),
    ],
)
async def test_what_a_neighbour_like_this_one_has_proved_serves_until_it_is_proved_here(tmp_path, differs, serves):
    neighbour, here = Proving(tmp_path, machine="pod 0", **SAME), Proving(tmp_path, machine="pod 1", **SAME | differs)
    life = await neighbour.proved(1)
    order = here.order(1, DEVICE)
    asked = await here.asked()
    assert asked.proof.serves_meanwhile is serves
    await settle(here.adapters)
    assert order.done() is serves, "it need not wait for its own proof"
    check = here.order(1)
    await settle(here.adapters)
    assert not check.done(), "it says only what it has proved itself"
    await here.proves(asked)
    assert (await check).proved_by == (here.kernels,)
    assert (await order).digest == life.digest
    for one in (neighbour, here):
        one.adapters.close()


def in_two_folders(tmp_path: Path, **differs: str) -> tuple[Proving, Proving]:
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
    there = Proving(tmp_path / "there", machine="pod 0", **SAME)
    return there, Proving(tmp_path / "here", machine="pod 1", **SAME | differs)


@pytest.mark.parametrize(
    ("differs", "serves"),
    [
        ({}, True),
        ({"hardware": "H100"}, False),
        ({"version": "2"}, False),
        ({"engine": "float16"}, False),
        ({"kernels": "cpp"}, False),
    ],
)
async def test_what_a_runner_like_this_one_has_proved_serves_as_the_scheduler_says(tmp_path, differs, serves):
    there, here = in_two_folders(tmp_path, **differs)
    builds = (await there.proved(1)).certificate.proved_builds
    assert len(builds) == 1
    order = here.order(1, DEVICE, builds=["another", *builds])
    asked = await here.asked()
    await settle(here.adapters)
    assert (asked.proof.serves_meanwhile, order.done()) == (serves, serves)
    assert not here.adapters.get(asked.digest).certificate.proved_builds, "it has proved nothing yet"
    check = here.order(1)
    await settle(here.adapters)
    assert not check.done(), "it says only what it has proved itself"
    await here.proves(asked)
    assert (await check).proved_by == (here.kernels,)
    assert list((await order).certificate.proved_builds) == list(builds) or not serves
    for one in (there, here):
        one.adapters.close()


async def test_what_begins_to_be_proved_serves_once_the_scheduler_says_that_one_like_this_has_proved_it(tmp_path):
    there, here = in_two_folders(tmp_path)
    builds = (await there.proved(1)).certificate.proved_builds
    first = here.order(1, DEVICE)
    asked = await here.asked()
    assert not asked.proof.serves_meanwhile
    here.adapters.on_loaded(AdapterLoaded(asked.digest, 10, 0.1))
    here.posted.clear()
    second = here.order(1, DEVICE, builds=builds)
    again = await here.asked()
    assert again.proof.serves_meanwhile
    assert again.proof.number != asked.proof.number
    for one in (first, second):
        assert (await one).digest == asked.digest
    await here.answers(again, AdapterUnproved("wrong", reason="ProofFailed"))
    here.posted.clear()
    here.order(1, DEVICE, builds=builds)
    assert not (await here.asked()).proof.serves_meanwhile, "it has found otherwise itself"
    for one in (there, here):
        one.adapters.close()


async def test_what_a_neighbour_has_proved_serves_no_longer_once_its_own_proof_has_failed(tmp_path):
    neighbour, here = (Proving(tmp_path, machine=f"pod {number}", **SAME) for number in range(2))
    await neighbour.proved(1)
    order = here.order(1, DEVICE)
    asked = await here.asked()
    await order
    told = await here.answers(asked, AdapterUnproved("wrong", reason="ProofFailed"))
    assert [ref.name for ref in told.refs] == ["a1"]
    assert DropAdapter(asked.digest) in here.posted
    here.posted.clear()
    here.order(1, DEVICE)
    assert not (await here.asked()).proof.serves_meanwhile
    for one in (neighbour, here):
        one.adapters.close()


async def test_a_check_of_what_serves_by_a_neighbours_proof_orders_a_proof_that_was_given_up(tmp_path):
    neighbour, here = (Proving(tmp_path, machine=f"pod {number}", **SAME) for number in range(2))
    await neighbour.proved(1)
    order = here.order(1, DEVICE)
    asked = await here.asked()
    await order
    here.adapters.on_loaded(AdapterLoaded(asked.digest, 10, 0.1))
    await here.answers(asked, AdapterError("its tokenizer could not be read", retry_after=0.0))
    here.posted.clear()
    check = here.order(1)
    await here.proves(await here.asked())
    assert (await check).proved_by == ("torch",)
    for one in (neighbour, here):
        one.adapters.close()


async def test_what_has_no_place_on_the_device_holds_up_no_proof_of_what_has_one(tmp_path):
    setup = Proving(tmp_path, capacity=16)
    digests = [(await setup.proved(n)).digest for n in range(1, 6)]
    *cold, hot = digests
    setup.adapters.on_loaded(AdapterLoaded(hot, 10, 0.1))
    setup.posted.clear()
    setup.adapters.on_kernels("cpp")
    await settle(setup.adapters)
    asked = [one for one in setup.posted if isinstance(one, LoadAdapter)]
    assert hot in [one.digest for one in asked]
    assert sum(one.digest in cold for one in asked) == MAX_AGAIN
    setup.posted.clear()
    setup.adapters.on_loaded(AdapterLoaded(cold[-1], 10, 0.1))
    setup.adapters.tick()
    await settle(setup.adapters)
    assert [one.digest for one in setup.posted if isinstance(one, LoadAdapter)] == [cold[-1]], "it has a place now"
    setup.adapters.close()
