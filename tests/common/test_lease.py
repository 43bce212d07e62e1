"""Candidates for one Lease: never two leaders, never a term twice, and no longer waits than necessary.

They run in virtual time, except where a process ends: so a busy machine does not make them late.
"""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from pydantic import ValidationError

from motet.clock import Clock, monotonic
from motet.errors import SetupError
from motet.kube import FORBIDDEN, KubeObject, StatusError, Unreachable
from motet.lease import TERMS_AT_A_TIME, Election, LeaseRecord
from motet.settings import LeaseSettings
from motet_simulator.leases import CuttableLeaseClient, FakeLeaseApi
from tests.common.virtual_time import in_virtual_time
from tests.common.waiting import until
from tests.support.surroundings import REAL, with_clock

LEASE, RENEW, RETRY = 1.0, 0.6, 0.1
SETTINGS = LeaseSettings(name="it", namespace="here", seconds=LEASE, renew_seconds=RENEW, retry_seconds=RETRY)
PATIENCE_S = 60.0
"""The timeout of what runs in real time."""


@pytest.fixture
def leases() -> FakeLeaseApi:
    return FakeLeaseApi()


class Candidate(Election):
    def __init__(self, leases: FakeLeaseApi, address: str = "", *, clock: Clock | None = None) -> None:
        self.losses: list[str] = []
        self.line = CuttableLeaseClient(leases)
        now = clock or asyncio.get_running_loop().time
        super().__init__(self.line, SETTINGS, address=address, surroundings=with_clock(now), lost=self.losses.append)


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def candidates(leases: FakeLeaseApi, count: int) -> AsyncIterator[list[Candidate]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Candidate(leases, f"10.0.0.{number}:1")) for number in range(count)]


@in_virtual_time
async def test_one_candidate_wins_and_the_others_know_its_address(leases: FakeLeaseApi) -> None:
    async with candidates(leases, 4) as all_of_them:
        (leader,) = [one for one in all_of_them if one.leads]
        await asyncio.sleep(2 * LEASE)
        assert [one for one in all_of_them if one.leads] == [leader]
        assert {one.leader_address for one in all_of_them} == {"10.0.0.0:1"}
        assert leases.holder == leader.identity
        assert not any(one.losses for one in all_of_them)


@in_virtual_time
async def test_a_leader_that_leaves_is_followed_at_once_in_a_higher_term(leases: FakeLeaseApi) -> None:
    async with Candidate(leases) as first:
        assert first.term == 1
    terms = [1]
    for _ in range(3):
        async with Candidate(leases) as first:
            terms.append(first.term)
            async with Candidate(leases) as waiting:
                assert not waiting.leads
                left = asyncio.create_task(first.__aexit__(None, None, None))
                started = now()
                await waiting.wait_until_leader()
                assert now() - started <= RETRY
                terms.append(waiting.term)
                await left
    assert terms == list(range(1, 8))


@in_virtual_time
async def test_between_two_leaders_there_is_no_address(leases: FakeLeaseApi) -> None:
    async with Candidate(leases, "a:1"):
        pass
    assert leases.holder == ""
    leases.away = True
    async with Candidate(leases, "b:1") as second:
        assert second.leader_address == ""


@in_virtual_time
async def test_a_leader_that_vanishes_is_followed_when_its_lease_ends_and_not_before(leases: FakeLeaseApi) -> None:
    async with Candidate(leases) as first:
        assert first.campaign is not None
        first.campaign.cancel()  # as if its process had been killed
        vanished = now()
        async with Candidate(leases) as second:
            await second.wait_until_leader()
            assert LEASE - RETRY <= now() - vanished <= LEASE + RETRY
            assert second.term == first.term + TERMS_AT_A_TIME, "above all that the first one had reserved"


@in_virtual_time
async def test_while_the_api_server_is_away_the_leader_leads_but_is_not_sure(leases: FakeLeaseApi) -> None:
    async with candidates(leases, 3) as (leader, *others):
        term = leader.term
        leases.away = True
        await until(lambda: not leader.is_leader_for_sure, RENEW + RETRY)
        await asyncio.sleep(3 * LEASE)
        assert (leader.leads, leader.term, leader.losses) == (True, term, [])
        leases.away = False
        await until(lambda: leader.is_leader_for_sure)
        await asyncio.sleep(LEASE)
        assert not any(one.leads for one in others), "whoever led before the outage comes first"
        assert (leader.leads, leader.term, leader.losses) == (True, term, [])


@in_virtual_time
async def test_a_leader_that_is_cut_off_becomes_unsure_before_another_wins_and_then_ends(
    leases: FakeLeaseApi,
) -> None:
    async with candidates(leases, 2) as (leader, other):
        cut = now()
        leader.line.cut = True
        await until(lambda: not leader.is_leader_for_sure)
        assert RENEW - RETRY <= now() - cut <= RENEW + RETRY
        assert not other.leads
        await other.wait_until_leader()
        assert now() - cut <= LEASE + RETRY
        assert other.predecessor == "10.0.0.0:1"
        assert leader.losses == [], "its streams go on; what it orders has a lower term"
        leader.step_down_for(other.term)
        assert f"another process leads, in term {other.term}" in leader.losses[0]
        leader.line.cut = False
        await until(lambda: len(leader.losses) > 1)
        assert leader.losses[-1] == f"the Lease here/it is now held by {other.identity}"


@in_virtual_time
async def test_a_sure_leader_does_not_step_down_for_a_higher_term(leases: FakeLeaseApi) -> None:
    async with Candidate(leases) as leader:
        leader.step_down_for(leader.term + 7)
        assert (leader.leads, leader.losses) == (True, [])


@in_virtual_time
async def test_a_leader_survives_a_missing_permission_for_a_while(leases: FakeLeaseApi) -> None:
    async with candidates(leases, 2) as (leader, other):
        leases.refusing = StatusError(FORBIDDEN, "forbidden")
        await asyncio.sleep(2 * LEASE)
        leases.refusing = None
        await until(lambda: leader.is_leader_for_sure)
        await asyncio.sleep(2 * RETRY)
        assert (leader.leads, other.leads, leader.losses) == (True, False, [])


@in_virtual_time
async def test_leadership_ends_although_the_event_loop_hangs(leases: FakeLeaseApi) -> None:
    async with Candidate(leases, clock=monotonic) as leader:
        deadline = monotonic() + PATIENCE_S
        while not leader.losses:
            time.sleep(0.01)  # noqa: ASYNC251
            assert monotonic() < deadline
        assert leader.leads  # as far as the loop knows
        assert not leader.is_leader_for_sure


@in_virtual_time
async def test_a_short_failure_of_the_api_server_changes_no_leader(leases: FakeLeaseApi) -> None:
    async with candidates(leases, 2) as (leader, other):
        for _ in range(3):
            leases.away = True
            await asyncio.sleep(RENEW / 2)
            leases.away = False
            await asyncio.sleep(3 * RETRY)
        assert (leader.leads, other.leads, leader.losses) == (True, False, [])


@in_virtual_time
async def test_a_leader_whose_lease_another_holds_ends_at_once(leases: FakeLeaseApi) -> None:
    async with Candidate(leases) as leader:
        assert leases.lease is not None
        leases.write(leases.lease | {"spec": {**leases.lease["spec"], "holderIdentity": "somebody"}})
        await until(lambda: leader.losses, 2 * RETRY)
        assert leader.losses[0] == "the Lease here/it is now held by somebody"


@in_virtual_time
async def test_the_leader_keeps_a_lease_that_is_annotated_or_deleted(leases: FakeLeaseApi) -> None:
    async with candidates(leases, 2) as (leader, other):
        assert leases.lease is not None
        leases.lease["metadata"]["labels"] = {"seen": "yes"}
        leases.write(leases.lease)
        await asyncio.sleep(3 * RETRY)
        assert leases.lease["metadata"]["labels"] == {"seen": "yes"}
        leases.lease = None
        await asyncio.sleep(LEASE + 3 * RETRY)
        led = [one for one in (leader, other) if one.leads and not one.losses]
        assert len(led) == 1
        assert leases.holder == led[0].identity


@pytest.mark.parametrize(
    "why", [Unreachable("away"), StatusError(FORBIDDEN, "the quota is used up"), ValueError("not what was expected")]
)
@in_virtual_time
async def test_the_leader_makes_a_deleted_lease_again_although_that_fails_at_first(
    leases: FakeLeaseApi, why: Exception
) -> None:
    async with Candidate(leases) as leader:
        leases.creation_fails = why
        leases.lease = None
        await asyncio.sleep(3 * RETRY)
        assert leases.lease is None
        leases.creation_fails = None
        await until(lambda: leases.holder == leader.identity, 2 * RETRY)
        await asyncio.sleep(LEASE)
        assert (leader.is_leader_for_sure, leader.losses) == (True, [])


@in_virtual_time
async def test_an_answer_that_is_no_lease_costs_a_leader_nothing(leases: FakeLeaseApi) -> None:
    async with Candidate(leases) as leader:
        put, garbled = leader.line.put, 0

        async def garble(path: str, body: KubeObject, *, seconds: float) -> KubeObject:
            nonlocal garbled
            await put(path, body, seconds=seconds)
            garbled += 1
            return {"message": "from a proxy"}

        leader.line.put = garble  # type: ignore[method-assign]
        await until(lambda: garbled == 3, LEASE)
        leader.line.put = put  # type: ignore[method-assign]
        await until(lambda: leader.is_leader_for_sure, LEASE)
        await asyncio.sleep(LEASE)
        assert (leader.is_leader_for_sure, leader.losses) == (True, [])


@pytest.mark.parametrize("answer", [{}, {"message": "<html>log in"}, {"kind": "Status", "metadata": {}}, "the old one"])
@in_virtual_time
async def test_a_write_without_a_lease_as_its_answer_renews_nothing(
    leases: FakeLeaseApi, answer: KubeObject | str
) -> None:
    async with candidates(leases, 2) as (leader, other):
        old = await leader.fetch()

        async def write_nothing(path: str, body: KubeObject, *, seconds: float) -> KubeObject:
            assert old is not None
            return answer if isinstance(answer, dict) else old | {"spec": {}}

        leader.line.put = leader.line.post = write_nothing  # type: ignore[method-assign]
        asked, told = leader.reserved + 1, list[int]()
        leader.raise_term_above(asked, lambda: told.append(leader.term))
        await asyncio.wait_for(other.wait_until_leader(), LEASE + RETRY)
        assert not leader.is_leader_for_sure
        assert (leader.term, told) == (1, []), "a term is in the Lease before anybody learns it"


@pytest.mark.parametrize("answer", [{}, {"message": "<html>log in"}, {"kind": "Lease", "metadata": 1}])
@in_virtual_time
async def test_a_candidate_waits_while_the_answers_are_no_leases(leases: FakeLeaseApi, answer: KubeObject) -> None:
    candidate = Candidate(leases)
    line = candidate.line
    usual = line.get, line.post

    async def garble(path: str, body: KubeObject | None = None, *, seconds: float) -> KubeObject:
        return answer

    line.get = garble  # type: ignore[method-assign]
    async with candidate:
        await asyncio.sleep(3 * RETRY)
        line.get, line.post = usual[0], garble  # type: ignore[method-assign]
        await asyncio.sleep(3 * RETRY)
        assert (candidate.leads, leases.lease) == (False, None)
        line.post = usual[1]  # type: ignore[method-assign]
        await asyncio.wait_for(candidate.wait_until_leader(), 3 * RETRY)


@in_virtual_time
async def test_a_leader_whose_deleted_lease_another_has_made_ends(leases: FakeLeaseApi) -> None:
    async with Candidate(leases) as leader:
        leases.creation_fails = Unreachable("away")
        leases.lease = None
        await asyncio.sleep(3 * RETRY)
        leases.write({"metadata": {"name": "it", "namespace": "here"}, "spec": {"holderIdentity": "somebody"}})
        await until(lambda: leader.losses, 2 * RETRY)
        assert leader.losses[0] == "the Lease here/it is now held by somebody"


@in_virtual_time
async def test_a_candidate_notices_that_it_won_without_an_answer(leases: FakeLeaseApi) -> None:
    leases.deaf = True
    async with Candidate(leases) as candidate:
        assert not candidate.leads
        leases.deaf = False
        await asyncio.wait_for(candidate.wait_until_leader(), 2 * RETRY)
        assert candidate.term == 1 + TERMS_AT_A_TIME, "the first ones are reserved by the write without an answer"


@in_virtual_time
async def test_a_later_term_that_a_peer_has_seen_is_exceeded_and_kept(leases: FakeLeaseApi) -> None:
    told: list[int] = []
    async with Candidate(leases) as leader:
        leader.raise_term_above(41, lambda: told.append(leader.term))
        await until(lambda: told == [42])
        assert leases.term >= 42
        leader.raise_term_above(7, lambda: told.append(leader.term))
        await until(lambda: told == [42, 42])
        leader.raise_term_above(99, lambda: told.append(leader.term))  # and resigned at once
    assert told == [42, 42]
    async with Candidate(leases) as successor:
        assert successor.term == 101


@in_virtual_time
async def test_a_higher_term_is_in_the_lease_before_it_is_announced(leases: FakeLeaseApi) -> None:
    async with candidates(leases, 2) as (leader, other):
        told: list[bool] = []
        leases.away = True
        for _ in range(3):
            leader.raise_term_above(41, lambda: told.append(leases.term >= leader.term))
        await asyncio.sleep(3 * RETRY)
        assert (leader.term, told) == (1, []), "while it cannot be written the old one holds"
        leases.away = False
        leases.deaf = True  # it is written, but nobody has been told
        await until(lambda: leases.term >= 42)
        assert (leader.term, told) == (1, [])
        leases.deaf = False
        await until(lambda: leader.term == 42)
        assert told == [True] * 3
        assert (leader.losses, other.leads) == ([], False)


@in_virtual_time
async def test_a_leader_that_cannot_write_the_lease_raises_its_term_as_often_as_it_has_reserved(
    leases: FakeLeaseApi,
) -> None:
    async with candidates(leases, 2) as (leader, other):
        leader.line.cut = True
        told: list[int] = []
        for term in range(1, TERMS_AT_A_TIME + 1):
            leader.raise_term_above(term, lambda: told.append(leader.term))
            await asyncio.sleep(0)
        assert told == list(range(2, TERMS_AT_A_TIME + 1)), "each at once, and the last one waits for the Lease"
        await other.wait_until_leader()
        assert other.term > leader.term


@in_virtual_time
async def test_a_write_reserves_sixteen_terms_the_present_one_included(leases: FakeLeaseApi) -> None:
    """One that leaves gives back those that it did not use."""
    async with Candidate(leases) as leader:
        assert (leader.term, leases.term) == (1, 16)
        leader.raise_term_above(1, lambda: None)
        await until(lambda: leases.term == 17)
        assert leader.term == 2
    async with Candidate(leases) as successor:
        assert (successor.term, leases.term) == (3, 18)


@in_virtual_time
async def test_each_renewal_reserves_terms_again(leases: FakeLeaseApi) -> None:
    async with Candidate(leases) as leader:
        for _ in range(3):
            before = leader.term
            for _ in range(TERMS_AT_A_TIME - 1):
                leader.raise_term_above(leader.term, lambda: None)
            assert leader.term == before + TERMS_AT_A_TIME - 1
            await asyncio.sleep(2 * RETRY)


@in_virtual_time
async def test_a_leader_that_releases_the_lease_raises_its_term_no_more(leases: FakeLeaseApi) -> None:
    async with Candidate(leases) as leader:
        leaving = asyncio.create_task(leader.__aexit__(None, None, None))
        await until(lambda: leases.holder == "", 2 * RETRY)
        leader.raise_term_above(leader.term, lambda: None)
        assert leader.term == leases.term == 1
        await leaving


@in_virtual_time
async def test_a_candidate_that_loses_after_raising_the_term_never_led_in_it(leases: FakeLeaseApi) -> None:
    async with candidates(leases, 2) as (leader, other):
        leader.line.cut = True
        leader.raise_term_above(41, lambda: None)
        await asyncio.wait_for(other.wait_until_leader(), LEASE + RETRY)
        assert (leader.term, other.term) == (1, 1 + TERMS_AT_A_TIME)
        leader.step_down_for(other.term)
        assert leader.losses


@pytest.mark.parametrize("noted", ["many", str(2**64 - 1), "9" * 5000])
@in_virtual_time
async def test_after_a_damaged_term_the_next_one_is_above_any_counter(leases: FakeLeaseApi, noted: str) -> None:
    async with Candidate(leases):
        pass
    assert leases.lease is not None
    leases.lease["metadata"]["annotations"]["motet.dev/term"] = noted
    async with Candidate(leases) as leader:
        assert 1_500_000_000 < leader.term < 2**32


@in_virtual_time
async def test_the_term_of_a_foreign_lease_comes_from_its_transitions(leases: FakeLeaseApi) -> None:
    leases.write({"metadata": {"name": "it", "namespace": "here"}, "spec": {"leaseTransitions": 8}})
    async with Candidate(leases) as leader:
        assert leader.term == 9
        assert leases.lease is not None
        assert leases.lease["spec"]["leaseTransitions"] == 9


def test_an_empty_lease_is_free() -> None:
    assert LeaseRecord.of({"metadata": {}}, REAL.wall) == LeaseRecord("", 0.0, "", 0, 0, "")


@in_virtual_time
async def test_a_forbidden_request_says_what_to_grant(leases: FakeLeaseApi) -> None:
    leases.refusing = StatusError(FORBIDDEN, 'leases "it" is forbidden')
    with pytest.raises(SetupError, match=r"forbidden\. Grant .* get, create and update on leases"):
        async with Candidate(leases):
            pass


@in_virtual_time
async def test_a_candidate_waits_for_a_server_that_is_away_at_the_start(leases: FakeLeaseApi) -> None:
    leases.away = True
    async with Candidate(leases) as candidate:
        await asyncio.sleep(3 * RETRY)
        assert not candidate.leads
        leases.away = False
        await asyncio.wait_for(candidate.wait_until_leader(), 2 * RETRY)


@in_virtual_time
async def test_every_start_is_a_new_candidate(leases: FakeLeaseApi) -> None:
    assert Candidate(leases).identity != Candidate(leases).identity


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"seconds": 5}, "their sum at most MOTET_LEASE_SECONDS"),
        ({"retry_seconds": 10}, "MOTET_LEASE_RETRY_SECONDS must be less than MOTET_LEASE_RENEW_SECONDS"),
        ({"name": "it"}, "MOTET_LEASE_NAMESPACE"),
    ],
)
def test_inconsistent_lease_settings_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LeaseSettings.model_validate(fields)


LEAD = """
import asyncio, sys, time
from motet.lease import Election
from motet_simulator.leases import FakeLeaseApi
from tests.common.test_lease import SETTINGS
from tests.support.surroundings import REAL

async def lead():
    leases = FakeLeaseApi()
    async with Election(leases, SETTINGS, surroundings=REAL):
        print("leads", flush=True)
        leases.away = True
        if sys.argv[1] == "hangs":
            time.sleep(60)
        await asyncio.Event().wait()

asyncio.run(lead())
"""


@pytest.mark.parametrize("how", ["hangs", "is stopped"])
def test_a_leader_that_missed_the_end_of_its_lease_exits_at_once(how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", LEAD, how], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "leads\n" in iter(process.stdout.readline, "")
            process.stdout.close()  # so that it cannot even log its last line
            if how == "is stopped":  # and continues when its time is over
                process.send_signal(signal.SIGSTOP)
                time.sleep(LEASE)
                process.send_signal(signal.SIGCONT)
            assert process.wait(PATIENCE_S) == 1
        finally:
            process.kill()


def test_a_local_stack_never_loads_the_clusters_client() -> None:
    code = "import motet_scheduler.__main__, motet.lease, motet.kube, sys; assert 'kubernetes' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
