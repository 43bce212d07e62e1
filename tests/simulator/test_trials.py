"""The whole system in simulated processes: what must hold holds, whatever a plan does to it."""

import asyncio
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from motet.api.v1 import scheduler_pb2
from motet.domain import RequestId
from motet.errors import DeadlineExceeded, ModelNotFound, PoolSaturated
from motet.sampling import Sampling
from motet.time_split import TimePart, TimeSplit
from motet_gateway.catalog import Catalog, Target
from motet_runner.interface import NewSequence
from motet_scheduler.policy.gateway_events import GatewayEvents
from motet_scheduler.policy.runners import Runner
from motet_simulator.fake_engine import FakeEngine, tokens_of
from motet_simulator.trials import __main__ as main_module
from motet_simulator.trials import run as run_module
from motet_simulator.trials import shrink as shrink_module
from motet_simulator.trials.__main__ import described, trial
from motet_simulator.trials.clients import Client
from motet_simulator.trials.draw import draw_plan
from motet_simulator.trials.draw_faults import FAULT_KINDS
from motet_simulator.trials.plan import BUSIEST, CONTEXT_TOKENS, GATEWAYS, LEADER, PAGE_TOKENS, Fault
from motet_simulator.trials.run import Outcome, messages_of, run_trial
from motet_simulator.trials.shrink import kind_of, shrunk
from motet_simulator.trials.system import System
from motet_simulator.trials.turn_checks import TurnChecks
from motet_simulator.world import time
from motet_supervisor.policy.runners import EngineProgress
from motet_supervisor.service import SupervisorService
from tests.simulator.defects import Defect, put_back

SEEDS = 40
"""Of twelve mended defects that are put back, the first forty seeds find eight. `test_defects.py` runs the seeds of the
other four."""
SOAK_SEEDS = 10_000
DRAWN = 200
"""Plans that are drawn and not run."""


def assert_none_fails(first: int, end: int) -> None:
    command = [sys.executable, "-m", "motet_simulator.trials", str(first), str(end), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(r"(\d+) with less than 60 requests and 8 faults", done.stdout)
    assert said is not None
    assert int(said[1]) <= (end - first) // 100


@pytest.mark.timeout(900)
def test_nothing_goes_wrong_in_the_first_trials():
    assert_none_fails(0, SEEDS)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_nothing_goes_wrong_in_ten_thousand_trials():
    assert_none_fails(SEEDS, SOAK_SEEDS)


def test_a_trial_sends_the_same_messages_each_time_in_each_process():
    """In these there are messages with maps. This process has other hashes than that one."""
    command = [sys.executable, "-m", "motet_simulator.trials", "--messages", "300", "302"]
    hashes = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": hashes}
    )
    assert done.stdout == "".join(f"{seed} {messages_of(seed)}\n" for seed in range(300, 302))


def test_a_fault_that_is_left_out_changes_nothing_before_it():
    plan = draw_plan(4)
    without = replace(plan, faults=plan.faults[:3])
    logs: list[list[tuple[float, str, bytes]]] = [[], []]
    for one, log in zip((plan, without), logs, strict=True):
        run_trial(one, lambda at, stream, message, log=log: log.append((at, stream, message)))
    until = plan.faults[3].at
    before = [[sent for sent in log if sent[0] < until] for log in logs]
    assert before[0] == before[1] != []
    assert logs[0] != logs[1]


def test_requests_are_answered_and_faults_of_every_kind_are_drawn():
    plans = [draw_plan(seed) for seed in range(50)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(FAULT_KINDS)
    assert all(len(plan.asks) >= 60 and len(plan.faults) >= 11 for plan in plans)
    assert {ask.too_large for plan in plans for ask in plan.asks} == {True, False}
    plan = replace(plans[1], faults=(), grants=(), settings=replace(plans[1].settings, queue_limit=10_000))
    outcome = run_trial(plan)
    assert outcome.problem == ""
    stays = sum(
        one.cancel_after is None and one.deadline == 300 and not (one.unreadable or one.too_large) for one in plan.asks
    )
    assert 50 < stays <= outcome.answered <= len(plan.asks), "who would leave may have its answer before"


def test_faults_are_drawn_where_they_can_do_something():
    for plan in map(draw_plan, range(DRAWN)):
        local, adapters = plan.settings.local, {change.name for change in plan.changes}
        for fault in plan.faults:
            assert local or fault.kind != "kill in write", "it has no files"
            assert not local or not (fault.kind.startswith("lease") or fault.host == "scheduler-1"), "there is one only"
            assert fault.host in adapters or not fault.kind.startswith("source")
            assert fault.kind != "disk full" or fault.host.startswith(("runner", "scheduler-0"))
            ends = {fault.host.partition("-")[0], fault.other.partition("-")[0]}
            assert not fault.other or ends & {LEADER, BUSIEST, "runner"}, "no stream is between them"


def test_a_fault_that_nothing_meets_does_nothing_and_one_of_a_process_between_two_lives_waits_for_the_next():
    faults = (
        Fault("kill", 2.0, "runner-0", seconds=3.0),
        Fault("source away", 2.0, "nobody", seconds=3.0),
        Fault("pause", 3.0, "runner-0", seconds=4.0),
        Fault("partition", 4.0, LEADER, "nobody", seconds=4.0),
        Fault("partition", 4.0, "runner-1", LEADER, seconds=4.0),
        Fault("break", 4.0, "predictor", "operator"),
        Fault("engine slows", 5.0, BUSIEST, seconds=1.0),
    )
    outcome = run_trial(replace(draw_plan(1), faults=faults))
    assert (outcome.problem, outcome.effective_faults) == ("", 4)
    assert run_trial(replace(outcome.plan, asks=())).effective_faults == 3, "no engine has work"


def test_who_asks_goes_to_another_gateway_or_waits_for_one():
    """Both are away for a while, and then one."""
    faults = tuple(Fault("kill", 1.0, f"gateway-{number}", seconds=4.0 + number) for number in range(GATEWAYS))
    outcome = run_trial(replace(draw_plan(1), faults=faults))
    assert (outcome.problem, outcome.asked) == ("", len(outcome.plan.asks))


@pytest.mark.parametrize(("seed", "limit"), [(1, 10_000), (1, 5), (2, 5)])
def test_a_product_that_refuses_everybody_does_not_pass(seed, limit, monkeypatch):
    monkeypatch.setattr(GatewayEvents, "_refusal", lambda *_: PoolSaturated("no"))
    plan = draw_plan(seed)
    outcome = run_trial(replace(plan, faults=(), settings=replace(plan.settings, queue_limit=limit)))
    assert "refused for room, but" in outcome.problem
    assert outcome.answered == 0


def test_a_failed_plan_is_made_smaller():
    plan = draw_plan(5)
    guilty = plan.asks[20].name

    def fails(smaller):
        return any(one.name == guilty for one in smaller.asks) and len(smaller.faults) > 1

    smallest = shrunk(plan, fails)
    assert [one.name for one in smallest.asks] == [guilty]
    assert len(smallest.faults) == 2
    assert smallest.drawn_events == 3


def test_a_failed_plan_gets_smaller_limits_and_longer_steps_if_fewer_requests_reach_them():
    plan = replace(draw_plan(5), faults=(), changes=(), settings=replace(draw_plan(5).settings, queue_limit=20))

    def fails(smaller):
        asks, settings = len(smaller.asks), smaller.settings
        return asks >= settings.queue_limit and asks * settings.step_seconds >= 0.4

    smallest = shrunk(plan, fails)
    assert (smallest.drawn_events, smallest.settings.queue_limit, smallest.settings.step_seconds) == (1, 1, 0.4)


def test_a_runner_that_never_comes_back_is_seen_and_described():
    """The checks can fail: with a pool that has lost all runners for good, requests do not end."""
    faults = tuple(Fault("kill", 2.0, f"runner-{number}", seconds=1e6) for number in range(3))
    outcome = run_trial(replace(draw_plan(1), faults=faults))
    assert "has not ended" in outcome.problem
    assert outcome.problem in described(outcome)
    assert "kind='kill'" in described(outcome)


def test_a_runner_that_nobody_needs_must_come_back_too():
    plan = replace(draw_plan(1), asks=(), faults=(Fault("kill", 2.0, "runner-0", seconds=1e6),))
    assert run_trial(plan).problem == "runner-0 has not come back"


def test_an_election_may_fail_only_while_nobody_can_read_its_lease():
    failing = Defect("", "motet.lease", "Election._renew", "self._raise_to(", "raise KeyError(")
    plan = replace(draw_plan(1), faults=(), settings=replace(draw_plan(1).settings, local=False))
    with put_back(failing):
        assert "event='lease_step_failed'" in run_trial(plan).problem


def sequence(name: str, *, pages: int) -> NewSequence:
    return NewSequence(
        request=RequestId(name), epoch=1, prompt=(1, 2, 3), promise=pages, sampling=Sampling(max_tokens=9)
    )


@pytest.mark.parametrize(
    "defect",
    [
        Defect("", "motet.lease", "Election._read_or_acquire", "record.term + 1\n", "max(1, record.term - 15)\n"),
        Defect("", "motet.leadership", "LocalLeadership.__enter__", "self._read() + 1", "(self._read() or 1)"),
    ],
    ids=["lease", "file"],
)
def test_a_term_that_repeats_is_a_problem(defect):
    local = defect.module == "motet.leadership"
    kill = (Fault("kill", 5.0, "scheduler-0", seconds=2.0), Fault("kill", 6.0, "scheduler-1", seconds=2.0))
    plan = replace(draw_plan(1), faults=kill, settings=replace(draw_plan(1).settings, local=local))
    assert run_trial(plan).problem == ""
    with put_back(defect):
        assert " in which scheduler-" in run_trial(plan).problem


def test_who_makes_a_deleted_lease_anew_must_find_a_higher_term_than_its_peers_know():
    drawn = draw_plan(1)
    deleted = (Fault("lease deleted", 5.3, ""),)
    plan = replace(drawn, faults=deleted, settings=replace(drawn.settings, local=False))
    outcome = run_trial(plan)
    assert (outcome.problem, outcome.effective_faults) == ("", 1)
    raises = "self._leadership.raise_term_above(seen, self._announce_term)"
    with put_back(Defect("", "motet_scheduler.service", "SchedulerService._raise_term_above", raises, "return False")):
        assert re.search(r"serves catalog \(1, \d+\) after \(1, \d+\)", run_trial(plan).problem)


def test_a_term_that_another_had_is_a_problem_also_if_it_rises_to_that_later():
    """The first scheduler leads in another term until the third second, then both lead in this one."""
    now = "self.schedulers[host].term"
    rises = Defect("", "motet_simulator.trials.system", "System.note_term", now, f"99 if self.world.now > 3 else {now}")
    kill = (Fault("kill", 5.0, LEADER, seconds=20.0),)
    with put_back(rises):
        assert " in term 99, in which scheduler-" in run_trial(replace(draw_plan(1), asks=(), faults=kill)).problem


def test_one_placement_on_two_runners_is_a_problem_although_no_look_sees_it():
    checks, engines = TurnChecks(), [FakeEngine(pages=8, max_sequences=2) for _ in range(2)]
    for engine in engines:
        engine.add(sequence("r", pages=2))
    checks.check("one", engines[0].planner)
    with pytest.raises(AssertionError, match="on one and on other"):
        checks.check("other", engines[1].planner)
    checks.forget("one")
    checks.check("other", engines[1].planner)


def test_a_promise_beyond_the_limit_is_a_problem_but_not_a_limit_that_falls():
    checks, engine = TurnChecks(), FakeEngine(pages=8, max_sequences=3, preset="paged-promises")
    engine.set_overcommit(2.0)
    engine.add(sequence("r", pages=8))
    engine.add(sequence("s", pages=4))
    checks.check("one", engine.planner)
    engine.set_overcommit(1.0)
    checks.check("one", engine.planner)
    engine.planner.memory.ledger.adopt(RequestId("t"), 1)
    with pytest.raises(AssertionError, match="one promises 13 pages, 8 at most"):
        checks.check("one", engine.planner)


def test_a_request_that_waits_beside_room_is_a_problem():
    """Room that a request leaves is not offered to those that wait."""
    plan = replace(draw_plan(1), faults=())
    assert run_trial(plan).problem == ""
    defect = Defect("", "motet_scheduler.policy.queue", "Queue.retry_on", "self.freed[runner] = None", "pass")
    with put_back(defect):
        assert " waits although there is room on runner-" in run_trial(plan).problem


def test_a_copy_that_stays_full_although_its_runner_is_empty_is_a_problem(monkeypatch):
    """By the copy nobody waits beside room, as it has none. The runner's own book has some."""
    note = Runner.note_kv_pages

    def note_none(self, reported):
        note(self, 1 if self.instance == "runner-1" else reported)

    monkeypatch.setattr(Runner, "note_kv_pages", note_none)
    outcome = run_trial(replace(draw_plan(7), faults=()))
    assert " waits although there is room on runner-1 by its own book" in outcome.problem


def test_a_runner_that_is_said_to_hang_without_reason_is_a_problem(monkeypatch):
    """The supervisor sees no step, whatever is reported."""
    monkeypatch.setattr(EngineProgress, "see", lambda *_, **_named: False)
    outcome = run_trial(replace(draw_plan(1), faults=()))
    assert re.search(r"runner-\d is said to hang: its engine has work and took no step", outcome.problem)


def test_a_runner_that_takes_no_work_any_more_is_a_problem():
    """One that was silent once stays unhealthy, whatever it reports later."""
    condition = "if runner.unhealthy and (listing.moves or listing.idle):"
    module = "motet_scheduler.policy.runner_events"
    with put_back(Defect("", module, "RunnerEvents._all_listed", condition, "if False:")):
        plan = replace(draw_plan(1), faults=(Fault("pause", 5.0, "runner-0", seconds=4.5),))
        assert run_trial(plan).problem.startswith("runner-0 takes no work: it has sent nothing for")


def test_requests_of_the_base_model_may_not_fail_by_an_adapters_fault():
    assert not any(draw_plan(seed).may_fail("") for seed in range(50))


@pytest.mark.parametrize(
    ("problem", "alike"),
    [
        ("the scheduler still has ['q001']", "the scheduler still has ['q017', 'q3']"),
        ("gateway-0 serves 000b", "gateway-1 serves 1c2d"),
    ],
)
def test_how_many_are_listed_and_a_digests_letters_make_no_other_problem(problem, alike):
    assert kind_of(problem) == kind_of(alike) != kind_of("the scheduler waits")


def test_a_request_that_no_runner_can_hold_is_refused_and_no_other_is():
    drawn = draw_plan(1)
    largest = min(drawn.settings.pages * PAGE_TOKENS, CONTEXT_TOKENS)
    asks = tuple(replace(ask, prompt=(number,) * largest) for number, ask in enumerate(drawn.asks))
    plan = replace(drawn, asks=tuple(replace(ask, too_large=True) for ask in asks), faults=())
    outcome = run_trial(plan)
    assert (outcome.problem, outcome.answered) == ("", 0)
    assert "ends with ContextLengthExceeded" in run_trial(replace(plan, asks=asks)).problem


@pytest.mark.parametrize("held", [False, True])
def test_a_stream_whose_revision_was_replaced_may_end_only_if_nobody_holds_that(held):
    now = lambda: 1.0  # noqa: E731
    client = Client(draw_plan(1).asks[0], now, now, Catalog, lambda _: None, revision_is_gone=lambda _: not held)
    client.starts(Target(scheduler_pb2.CatalogGroup(), scheduler_pb2.CatalogAdapter(digest="sha256:old")))
    client.tokens.append(1)
    client.end(ModelNotFound("This revision is no longer served."))
    assert ("ends with ModelNotFound" in client.problem) is held


def test_the_times_of_an_attempt_are_not_those_of_the_next_one_that_never_starts():
    """Its adapter was replaced, and is deleted when its client asks again."""
    now = [1.0]
    clock = lambda: now[0]  # noqa: E731
    client = Client(draw_plan(1).asks[0], clock, clock, Catalog, lambda _: None, adapter_may_be_missing=True)
    client.starts(Target(scheduler_pb2.CatalogGroup(), scheduler_pb2.CatalogAdapter(digest="sha256:old")))
    client.split = TimeSplit(TimePart.QUEUE, now[0])
    now[0] = 2.0
    client.split.end(now[0])
    client.end(ModelNotFound("This revision is no longer served."))
    now[0], client.target = 3.0, None
    client.end(ModelNotFound("The model does not exist."))
    assert (client.attempts, client.problem) == (1, "")


def test_who_leaves_while_its_length_is_estimated_has_taken_no_other_time_than_its_gateway_says():
    drawn = draw_plan(1)
    asks = tuple(replace(ask, cancel_after=0.0003) for ask in drawn.asks)
    outcome = run_trial(replace(drawn, asks=asks, faults=()))
    assert (outcome.problem, outcome.answered) == ("", 0)


def test_a_service_whose_handler_fails_is_a_problem_although_all_go_on_without_it():
    fails = Defect(
        "",
        "motet_predictor.service",
        "PredictorService._predict",
        "[self._asked(one)",
        "[self.gone(one)",
    )
    with put_back(fails):
        said = run_trial(replace(draw_plan(1), faults=())).problem
    assert said.startswith("predictor: the handler of ")
    assert "AttributeError(" in said


@pytest.mark.parametrize("why", ["OSError(28, 'No space left on device')", "ValueError('the answer is no JSON')"])
def test_a_full_disk_or_a_garbled_lease_may_end_a_scheduler_only_until_it_leads(why, monkeypatch):
    monkeypatch.setattr(System, "kill", lambda self, host, _: self.processes[host].end(why))
    plan = replace(draw_plan(1), asks=(), settings=replace(draw_plan(1).settings, local=False))
    assert run_trial(replace(plan, faults=(Fault("kill", 0.0001, "scheduler-0"),))).problem == ""
    leaves = run_trial(replace(plan, faults=(Fault("kill", 5.0, LEADER),))).problem
    assert re.fullmatch(r"scheduler-\d\.0 ended: " + re.escape(why), leaves)


@pytest.mark.parametrize("may_drain", [False, True])
def test_a_stream_may_end_before_its_deadline_only_if_its_runner_may_have_drained(may_drain):
    now = [1.0]
    ask = replace(draw_plan(1).asks[0], deadline=4.0)
    clock = lambda: now[0]  # noqa: E731
    client = Client(ask, clock, clock, Catalog, lambda _: None, may_drain=may_drain)
    client.starts(Target(scheduler_pb2.CatalogGroup(), scheduler_pb2.CatalogAdapter()))
    client.tokens.append(1)
    now[0] = 3.5
    client.end(DeadlineExceeded("It waited too long."))
    assert ("was silent for 2.5 s only" in client.problem) is not may_drain


def test_a_gateway_that_paused_hands_on_late_what_came_in_time():
    ask = replace(draw_plan(1).asks[0], deadline=4.0)
    client = Client(ask, lambda: 5.0, lambda: 1.0, Catalog, lambda _: None)
    client.starts(Target(scheduler_pb2.CatalogGroup(), scheduler_pb2.CatalogAdapter()))
    client.deliver(tokens_of(ask.prompt, ask.seed, 1, ""), ())
    client.end(DeadlineExceeded("It waited too long."))
    assert client.problem == ""


@pytest.mark.parametrize("error", [KeyError("gone"), SystemExit(3)])
def test_a_check_or_a_fault_that_fails_is_the_problem_of_its_seed(error, monkeypatch):
    def kill(*_, **__):
        raise error

    monkeypatch.setattr(System, "kill", kill)
    outcome = run_trial(replace(draw_plan(1), faults=(Fault("kill", 1.0, "runner-0"),)))
    assert outcome.problem.startswith(f"{error!r} in kill, test_trials.py:")


def test_a_trial_in_which_time_stands_still_names_process_and_task(monkeypatch):
    async def forever():
        while True:
            await asyncio.sleep(0)

    monkeypatch.setattr(SupervisorService, "tick", lambda self: asyncio.create_task(forever(), name="spinning"))
    monkeypatch.setattr(time, "MAX_TURNS_AT_ONCE", 1_000)
    _, said = trial(1, True)
    assert "time stands still, the last event was of <supervisor.0, next: the task 'spinning'>" in said
    assert "seed 1" in said


def test_a_plan_is_made_smaller_only_while_it_fails_in_the_same_way(monkeypatch):
    """Without its first request this one fails in another way, and with any other smaller plan in the same one."""

    def run(plan, **_):
        first = any(one.name == "r0" for one in plan.asks)
        return Outcome(plan, f"r{len(plan.asks)} gets 0.{len(plan.asks)} tokens" if first else "else", 1.0, 0, 0, 0, 0)

    monkeypatch.setattr(shrink_module, "run_trial", run)
    monkeypatch.setattr(main_module, "run_trial", run)
    _, said = trial(3, False)
    asks = len(draw_plan(3).asks)
    assert said.startswith(f"r{asks} gets 0.{asks} tokens, at 1.000 s, and with a smaller plan: r1 gets 0.1 tokens")
    assert "name='r0'" in said


@pytest.mark.parametrize(
    ("kind", "lasts"),
    [
        ("leases away", lambda system: system.leases.away),
        ("leases garbled", lambda system: system.leases.garbled),
        ("drain", lambda system: "runner-0" in system.objects.draining),
        ("disk full", lambda system: system.disks["runner-0"].full),
        ("engine slows", lambda system: system.runners["runner-0"].engine.slowness > 1),
        ("engine hangs", lambda system: system.runners["runner-0"].engine.hangs),
        ("source away", lambda system: system.sources.away_until["runner-0"] > system.world.now),
    ],
)
def test_a_short_fault_does_not_end_a_longer_one(kind, lasts, monkeypatch):
    seen = []

    def look(system):
        if system.world.now > 2:
            seen.append((system.world.now, bool(lasts(system))))

    monkeypatch.setattr(run_module, "check_now", look)
    faults = tuple(Fault(kind, at, "runner-0", "runner-1", seconds) for at, seconds in ((2.0, 6.0), (3.0, 1.0)))
    assert run_trial(replace(draw_plan(1), faults=faults, asks=())).problem == ""
    assert {lasted for at, lasted in seen if 2.1 < at < 7.9} == {True}
    assert {lasted for at, lasted in seen if at > 8.1} == {False}
