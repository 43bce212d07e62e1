"""A runner's proof of an adapter fails: another runner is asked before the adapter is refused, and a runner on which
the proofs of several adapters fail is said to be at fault."""

from dataclasses import replace
from typing import Any

import pytest

from motet.api.v1 import scheduler_pb2
from motet.domain import Digest, InstanceName, RequestId
from motet.errors import REFERENCE_MISMATCH, AdapterIncompatible, AdapterUnproved
from motet.runner_info import Failure, KernelState
from motet_scheduler import conversion
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.checks import CHECKS_AT_ONCE, MAX_CHECKS_AT_WORK, MAX_CHECKS_OF_A_LINE
from motet_scheduler.policy.adapters.refused_digests import MAX_REFUSED
from motet_scheduler.policy.adapters.revision_state import MAX_REFUSED_BY, Standing
from motet_scheduler.policy.suspects import OTHERS_FAIL_TOO
from motet_scheduler.policy.values import (
    AGREE,
    DIFFER,
    MAX_BUILDS,
    MAX_KERNELS,
    AdapterReadiness,
    AdapterStage,
    Certificate,
    RevisionKey,
)
from motet_scheduler.policy.waiting_reasons import REFUSED
from tests.scheduler.builders import GROUP, PIRATE, POET, SchedulerDriver, adapter, pool, ready, resident
from tests.scheduler.test_adapters import checks, published

WRONG = Failure.of(AdapterUnproved("Its results are wrong.", reason="ProofFailed"))
DIFFERS = Failure.of(AdapterIncompatible("Its answers differ.", reason=REFERENCE_MISMATCH))
UNPROVED = Certificate(digest=PIRATE, rank=8)
AGREES = replace(UNPROVED, recorded_answers=AGREE)
DIFFERENT = replace(UNPROVED, recorded_answers=DIFFER)
NO_EFFECT = Failure.of(AdapterUnproved("It moves no logit.", reason="NoEffect"))


def refuse(driver: SchedulerDriver, instance: str, name: str = "pirate", failure: Failure = WRONG, **more: Any):
    return driver.certify(
        name,
        **({"digest": Digest(""), "instance": instance} | more),
        stage=AdapterStage.NONE,
        certificate=None,
        failure=failure,
    )


def news(driver: SchedulerDriver, instance: str, failure: Failure | None = WRONG, **more: Any):
    """What a runner says that nobody asked for"""
    return driver.certify(
        **({"stage": AdapterStage.NONE, "certificate": None} | more),
        instance=instance,
        failure=failure,
        order=0,
        ordered_stage=AdapterStage.NONE,
    )


def stack(*runners: str) -> SchedulerDriver:
    driver = ready()
    for one in runners:
        driver.attach(one)
    return driver


def report(driver: SchedulerDriver, name: str = "pirate") -> effects.ReportAdapter:
    return [one for one in driver.of(effects.ReportAdapter) if one.ref.name == name][-1]


def status(driver: SchedulerDriver) -> effects.ReportAdapter:
    """What a new operator is told"""
    state = driver.scheduler.state
    return state.reports.report(state.adapters.by_name[adapter().ref.object])


def test_another_runner_is_asked_before_an_adapter_is_refused():
    driver = stack("r0", "r1")
    driver.state(adapter())
    (first,) = checks(driver)
    refuse(driver, first.instance)
    (second,) = checks(driver)
    assert {first.instance, second.instance} == {"r0", "r1"}
    assert published(driver)["pirate"].state is AdapterReadiness.LOADING
    driver.certify(instance=second.instance)
    assert published(driver)["pirate"].digest == PIRATE
    assert report(driver).failure is None


def test_a_runner_that_can_prove_is_asked_before_one_with_vllm():
    """Else the adapter would serve unproved until the other one has loaded it."""
    driver = ready()
    driver.attach("a vllm")
    driver.attach("b own", kernels=KernelState("cpp", 1.0))
    driver.state(*(adapter(f"adapter-{number}") for number in range(CHECKS_AT_ONCE)))
    assert [one.instance for one in checks(driver)] == ["b own"] * CHECKS_AT_ONCE


def test_another_runner_is_asked_before_recorded_answers_refuse_an_adapter():
    """In 16 bits, one machine may be just beyond what is allowed."""
    driver = stack("r0", "r1")
    driver.state(adapter())
    (first,) = checks(driver)
    refuse(driver, first.instance, failure=DIFFERS)
    (second,) = checks(driver)
    assert {first.instance, second.instance} == {"r0", "r1"}
    refuse(driver, second.instance, failure=DIFFERS)
    assert not checks(driver)
    assert report(driver).failure == DIFFERS


def test_recorded_answers_that_a_runner_compares_later_are_told_and_a_difference_stays():
    driver = stack("r0")
    driver.state(adapter())
    driver.certify()
    told = {"failure": None, "stage": AdapterStage.CERTIFIED}
    for said, warning in (("Agree", ()), ("Differ", ("off by 0.6",)), ("Agree", ())):
        certificate = Certificate(digest=PIRATE, rank=8, recorded_answers=said, warnings=warning)
        news(driver, "r0", certificate=certificate, **told)
    certificate = status(driver).certificate
    assert (certificate.recorded_answers, certificate.warnings) == ("Differ", ("off by 0.6",))


def test_what_only_a_runner_that_has_gone_could_serve_is_withdrawn():
    driver = stack("r0", "r1")
    driver.state(adapter())
    (first,) = checks(driver)
    refuse(driver, first.instance)
    (second,) = checks(driver)
    driver.certify(instance=second.instance)
    driver.detach(second.instance)
    driver.wait(3600)
    news(driver, first.instance, digest=PIRATE)
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    assert status(driver).failure == WRONG


def test_what_a_runner_has_refused_is_not_kept_there():
    driver = stack("r0", "r1")
    driver.state(adapter(min_replicas=2))
    (first,) = checks(driver)
    refuse(driver, first.instance)
    (second,) = checks(driver)
    driver.certify(instance=second.instance)
    loads = []
    for _ in range(12):
        loads += [one.instance for one in driver.of(effects.EnsureAdapter) if one.stage is AdapterStage.DEVICE]
        driver.wait(10)
    assert {*loads} == {second.instance}


def test_two_versions_of_one_adapter_do_not_make_a_runner_a_suspect():
    driver = stack("r0", "r1")
    driver.state(adapter())
    (asked,) = checks(driver)
    driver.certify(instance=asked.instance)
    news(driver, asked.instance, digest=PIRATE)
    driver.state(adapter(stamp="2"))
    driver.wait(60)
    (asked,) = checks(driver)
    refuse(driver, asked.instance)
    said = status(driver)
    assert OTHERS_FAIL_TOO not in f"{said.failure} {said.certificate}"


def test_two_names_of_the_same_bytes_do_not_make_a_runner_a_suspect():
    driver = stack("r0", "r1")
    driver.state(adapter(), adapter("copy"))
    for asked in checks(driver):
        driver.certify(asked.ref.name, instance=asked.instance)
    news(driver, "r0")
    said = status(driver)
    assert said.certificate.warnings
    assert OTHERS_FAIL_TOO not in f"{said.certificate}"


def test_what_all_runners_refuse_has_failed_and_each_is_asked_once():
    driver = stack("r0", "r1")
    driver.state(adapter())
    for _ in range(2):
        (asked,) = checks(driver)
        refuse(driver, asked.instance)
    assert not checks(driver)
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    assert report(driver).failure == WRONG
    driver.wait(600)
    assert not checks(driver)


def test_a_runner_that_comes_later_is_asked_too():
    driver = stack("r0")
    driver.state(adapter())
    refuse(driver, "r0")
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    driver.attach("r1")
    (asked,) = checks(driver)
    assert asked.instance == "r1"
    driver.certify(instance="r1")
    assert published(driver)["pirate"].digest == PIRATE


class NeverWhole(dict):
    def values(self):
        pytest.fail("all adapters")


def test_when_a_runner_goes_adapters_are_not_looked_at_that_none_has_refused(monkeypatch):
    driver = serving("r0", "r1")
    driver.certify("poet", POET)
    news(driver, "r1")
    adapters, runner = driver.scheduler.adapters, driver.scheduler.runners["r1"]
    looked = []
    monkeypatch.setattr(adapters, "tell", lambda one: looked.append(one.spec.ref.name))
    monkeypatch.setattr(adapters, "by_name", NeverWhole(adapters.by_name))
    driver.scheduler.state.verdicts.runner_gone(runner)
    assert looked == ["pirate"]
    driver.scheduler.state.verdicts.runner_gone(runner)
    assert looked == ["pirate"], "no runner is named any more"


def test_a_runner_that_is_restarted_is_asked_again():
    driver = stack("r0")
    driver.state(adapter())
    refuse(driver, "r0")
    driver.attach("r0", incarnation="2")
    (asked,) = checks(driver)
    driver.certify(instance=asked.instance)
    assert published(driver)["pirate"].digest == PIRATE


def test_a_runner_that_refuses_what_another_one_has_proved_is_not_asked_again_and_again():
    driver = serving("r0", "r1")
    news(driver, "r0")
    driver.certify(instance="r1")
    for _ in range(3):
        news(driver, "r0")
        assert not checks(driver)
        driver.wait(10)
        assert not checks(driver)
    assert published(driver)["pirate"].digest == PIRATE


def test_another_failure_ends_the_asking():
    driver = stack("r0", "r1", "r2")
    driver.state(adapter())
    (first,) = checks(driver)
    refuse(driver, first.instance)
    (second,) = checks(driver)
    refuse(driver, second.instance, failure=Failure("adapter_incompatible", "no config"))
    assert not checks(driver)
    driver.wait(60)
    assert not checks(driver)
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED


def test_an_adapter_without_effect_is_refused_at_once():
    driver = stack("r0", "r1")
    driver.state(adapter())
    (asked,) = checks(driver)
    refuse(driver, asked.instance, failure=NO_EFFECT)
    assert not checks(driver)
    assert report(driver).failure == NO_EFFECT


def test_new_bytes_are_asked_of_every_runner_again():
    driver = stack("r0")
    driver.state(adapter())
    refuse(driver, "r0")
    driver.state(adapter(stamp="2"))
    driver.wait(60)
    driver.certify(digest=POET)
    assert published(driver)["pirate"].digest == POET


def test_a_runner_on_which_other_proofs_fail_too_is_at_fault_and_all_owners_hear_it():
    driver = stack("r0")
    driver.state(adapter(), adapter("poet"))
    refuse(driver, "r0")
    assert report(driver).failure == WRONG
    refuse(driver, "r0", "poet")
    for name in ("pirate", "poet"):
        assert report(driver, name).failure.message == f"{WRONG.message} {OTHERS_FAIL_TOO}"
        assert report(driver, name).failure.reason == "ProofFailed"


def test_a_runner_that_proves_another_one_is_not_at_fault():
    driver = stack("r0")
    driver.state(adapter(), adapter("poet"), adapter("pilot"))
    refuse(driver, "r0")
    refuse(driver, "r0", "poet")
    driver.certify("pilot", digest=Digest("sha256:" + "c" * 64))
    assert report(driver).failure == WRONG
    assert report(driver, "poet").failure == WRONG


def serving(*runners: str, **how: Any) -> SchedulerDriver:
    driver = stack(*runners)
    driver.state(adapter())
    (asked,) = checks(driver)
    driver.certify(instance=asked.instance, **how)
    for one in runners:
        driver.report(one, resident=resident(PIRATE))
    return driver


def test_a_later_proof_that_fails_asks_another_runner_and_the_adapter_serves_on():
    driver = serving("r0", "r1")
    news(driver, "r0")
    (asked,) = checks(driver)
    assert asked.instance == "r1"
    assert published(driver)["pirate"].digest == PIRATE
    driver.certify(instance="r1")
    assert published(driver)["pirate"].digest == PIRATE
    assert report(driver).failure is None
    driver.wait(60)
    assert not checks(driver)


def test_a_later_proof_that_fails_everywhere_takes_the_adapter_out_of_service():
    driver = serving("r0", "r1")
    news(driver, "r0")
    refuse(driver, "r1")
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    found = report(driver)
    assert (found.serving, found.failure) == ("", WRONG)


def test_with_one_runner_a_later_proof_that_fails_is_said_at_once():
    driver = serving("r0")
    news(driver, "r0")
    assert not checks(driver)
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    assert report(driver).failure == WRONG


def test_news_of_other_bytes_or_of_another_name_change_nothing():
    driver = serving("r0")
    news(driver, "r0", digest=POET)
    news(driver, "r0", name="nobody")
    assert published(driver)["pirate"].digest == PIRATE
    driver.state(adapter(stamp="2"))
    news(driver, "r0")
    assert published(driver)["pirate"].digest == PIRATE, "a newer revision is on its way"


def test_what_is_remembered_of_runners_is_bounded():
    driver = ready()
    driver.state(adapter())
    for number in range(MAX_REFUSED_BY + 5):
        driver.attach(f"r{number}")
        refuse(driver, f"r{number}")
        driver.detach(f"r{number}")
    assert len(driver.scheduler.adapters.by_name[adapter().ref.object].newest.refusals) == MAX_REFUSED_BY


def test_the_kernels_that_have_proved_an_adapter_are_told_once_each():
    driver = serving("r0", "r1", certificate=UNPROVED)
    told = []
    for number in range(3):
        certificate = Certificate(digest=PIRATE, rank=8, proved_by=(f"kernels {number}",))
        for instance in ("r0", "r1", "r0"):
            news(driver, instance, None, stage=AdapterStage.DEVICE, certificate=certificate)
            told += driver.of(effects.ReportAdapter)
            driver.wait(1)
            told += driver.of(effects.ReportAdapter)
    assert [one.certificate.proved_by for one in told] == [
        ("kernels 0",),
        ("kernels 0", "kernels 1"),
        ("kernels 0", "kernels 1", "kernels 2"),
    ]
    many = Certificate(digest=PIRATE, rank=8, proved_by=tuple(map(str, range(50))))
    news(driver, "r0", None, stage=AdapterStage.DEVICE, certificate=many)
    told = driver.of(effects.ReportAdapter)
    driver.wait(1)
    told += driver.of(effects.ReportAdapter)
    assert len(told[-1].certificate.proved_by) == MAX_KERNELS


def test_a_load_says_which_builds_have_proved_the_bytes_unless_a_runner_has_refused_them():
    proved = Certificate(digest=PIRATE, rank=8, proved_by=("torch",), proved_builds=("old",))
    driver = serving("r0", certificate=proved)
    again = Certificate(digest=PIRATE, rank=8, proved_by=("cpp",), proved_builds=("new",))
    news(driver, "r0", None, stage=AdapterStage.DEVICE, certificate=again)
    driver.detach("r0")
    driver.attach("r1")
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate")
    (load,) = [one for one in driver.of(effects.EnsureAdapter) if one.stage is AdapterStage.DEVICE]
    assert (load.instance, load.proved_builds) == ("r1", ("old", "new"))
    driver.attach("r2")
    news(driver, "r1")
    driver.enqueue("b", digest=PIRATE, adapter="default/pirate")
    (load,) = [one for one in driver.of(effects.EnsureAdapter) if one.stage is AdapterStage.DEVICE]
    assert (load.instance, load.proved_builds) == ("r2", ())


def test_a_certificate_names_the_newest_builds():
    driver = serving("r0", certificate=UNPROVED)
    for number in range(MAX_BUILDS + 3):
        proved = Certificate(digest=PIRATE, rank=8, proved_by=("torch",), proved_builds=(f"{number}",))
        news(driver, "r0", None, stage=AdapterStage.DEVICE, certificate=proved)
    builds = status(driver).certificate.proved_builds
    assert builds == tuple(map(str, range(3, MAX_BUILDS + 3)))


def test_what_is_doubted_is_not_once_another_runner_tells_of_its_own_proof():
    """As of one that served by an older proof, and was asked before it had made a new one"""
    driver = serving("r0", "r1")
    news(driver, "r0")
    driver.certify(instance="r1", certificate=UNPROVED)
    one = driver.scheduler.adapters.by_name[adapter().ref.object]
    assert one.newest.standing is Standing.DOUBTED
    proved = Certificate(digest=PIRATE, rank=8, proved_by=("cpp",))
    news(driver, "r1", None, stage=AdapterStage.DEVICE, certificate=proved)
    assert one.newest.standing is Standing.PROVED
    assert len(one.newest.refusals) == 1


def test_a_hello_with_many_refusals_has_the_queue_tried_once():
    driver = serving("r0")
    driver.attach("r1", refused={Digest(f"sha256:{number:064x}"): WRONG for number in range(100)})
    tried = []
    queue = driver.scheduler.state.queue(GROUP)
    queue.try_all_again, before = lambda: (tried.append(1), before()), queue.try_all_again
    driver.attach("r1", refused={Digest(f"sha256:{number:064x}"): WRONG for number in range(50, 150)})
    assert len(tried) == 1


def test_a_base_model_is_refused_by_nobody():
    driver = serving("r0")
    driver.enqueue("a")
    decline(driver, "r0", 1)
    driver.lose("a", 1)
    driver.enqueue("b")
    assert driver.where("b") == "r0"


def test_a_new_leader_hears_from_runners_what_they_refuse():
    driver = serving("r0", "r1")
    news(driver, "r0")
    checks(driver)
    driver.certify(instance="r1")
    after = SchedulerDriver(saved=driver.scheduler.catalog_to_save(), now=5000.0)
    after.gateway()
    after.attach("r0", refused={PIRATE: WRONG, POET: NO_EFFECT})
    after.attach("r1")
    (warning,) = status(after).certificate.warnings
    assert warning.startswith("its proof has failed on r0")
    for number in range(4):
        after.enqueue(f"q{number}", digest=PIRATE)
        assert after.where(f"q{number}") == "r1"
    after.attach("r0")
    assert not status(after).certificate.warnings, "it has proved it while it was away"


def test_a_hello_that_does_not_say_that_it_tells_all_takes_no_refusal_back():
    """As of a runner of an earlier version, which has declined a request before its stream broke"""
    driver = serving("r0", "r1")
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate")
    bad = driver.where("a")
    (good,) = {"r0", "r1"} - {bad}
    decline(driver, bad, 1)
    driver.lose("a", 1)
    driver.detach(bad)
    driver.attach(bad, refused_is_all=False)
    assert may_serve(driver) == {good}
    assert status(driver).certificate.warnings
    driver.attach(bad)
    assert may_serve(driver) == {"r0", "r1"}


@pytest.mark.parametrize(
    ("told", "says", "is_all"), [(3, True, True), (3, False, False), (MAX_REFUSED + 1, True, False)]
)
def test_a_hello_of_which_a_part_is_read_is_not_all(told, says, is_all):
    refused = [{"digest": f"sha256:{number:064x}", "failure": WRONG.to_proto()} for number in range(told)]
    hello = scheduler_pb2.RunnerHello(refused=refused, refused_is_all=says)
    event = conversion.runner_attached(hello)
    assert (len(event.refused), event.refused_is_all) == (min(told, MAX_REFUSED), is_all)


def test_a_leader_that_knows_no_adapter_yet_remembers_what_a_runner_refuses():
    driver = SchedulerDriver()
    driver.gateway()
    driver.attach("r0", refused={PIRATE: WRONG})
    driver.attach("r1")
    driver.state(adapter())
    (asked,) = checks(driver)
    if asked.instance == "r0":
        driver.wait(driver.scheduler.config.load_retry)
        (asked,) = checks(driver)
    driver.certify(instance="r1", order=asked.order)
    (warning,) = status(driver).certificate.warnings
    assert warning.startswith("its proof has failed on r0")


def decline(driver: SchedulerDriver, instance: str, epoch: int, failure: Failure = WRONG):
    return driver.send(events.RunnerDeclined(InstanceName(instance), RequestId("a"), epoch, failure))


def test_a_request_that_a_runner_declines_for_its_proof_goes_to_each_other_runner_once():
    driver = serving("r0", "r1", "r2")
    driver.enqueue("a", digest=PIRATE)
    asked = []
    for epoch in (1, 2, 3):
        asked.append(driver.where("a"))
        decline(driver, asked[-1], epoch)
        driver.lose("a", epoch)
        assert bool(driver.of(effects.SendRefused)) is (epoch == 3)
    assert sorted(asked) == ["r0", "r1", "r2"]


def test_a_request_for_what_serves_and_has_no_effect_on_one_runner_goes_to_another_one():
    driver = serving("r0", "r1")
    driver.enqueue("a", digest=PIRATE)
    first = driver.where("a")
    decline(driver, first, 1, NO_EFFECT)
    driver.lose("a", 1)
    assert not driver.of(effects.SendRefused)
    second = driver.where("a")
    assert {first, second} == {"r0", "r1"}
    decline(driver, second, 2, NO_EFFECT)
    driver.lose("a", 2)
    (refused,) = driver.of(effects.SendRefused)
    assert refused.failure == NO_EFFECT


@pytest.mark.parametrize("failure", [WRONG, NO_EFFECT])
@pytest.mark.parametrize(("bad", "good"), [("r0", "r1"), ("r1", "r0")])
def test_no_request_goes_to_a_runner_that_is_known_to_refuse_its_adapter(bad, good, failure):
    driver = serving("r0", "r1")
    news(driver, bad, failure)
    checks(driver)
    driver.certify(instance=good)
    driver.report(bad)
    driver.enqueue("base")
    for number in range(6):
        driver.enqueue(f"q{number}", digest=PIRATE)
        assert driver.where(f"q{number}") == good


def test_a_request_that_waits_goes_to_a_runner_once_that_proves_its_adapter():
    driver = serving("r0", "r1")
    news(driver, "r0")
    checks(driver)
    driver.certify(instance="r1")
    driver.report("r0")
    driver.detach("r1")
    driver.enqueue("a", digest=PIRATE)
    assert not driver.where("a")
    proved = Certificate(digest=PIRATE, rank=8, proved_by=("torch",))
    news(driver, "r0", None, stage=AdapterStage.CERTIFIED, certificate=proved)
    assert driver.where("a") == "r0"


def test_a_request_waits_while_a_runner_may_come_that_serves_its_adapter_and_then_is_refused():
    driver = serving("r0")
    driver.state(adapter(), pools=(pool(replicas=2),))
    news(driver, "r0")
    driver.enqueue("a", digest=PIRATE)
    assert driver.scheduler.requests[RequestId("a")].waiting_reason == REFUSED
    driver.wait(driver.scheduler.config.report_patience)
    (refused,) = driver.of(effects.SendRefused)
    assert refused.failure == WRONG


def test_max_replicas_does_not_count_a_runner_that_refuses():
    driver = serving("r0", "r1")
    driver.state(adapter(max_replicas=1))
    driver.report("r0", resident=resident(PIRATE))
    news(driver, "r0")
    checks(driver)
    driver.certify(instance="r1")
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate")
    assert driver.where("a") == "r1"


def test_what_is_wrong_with_the_bytes_is_so_under_each_name_and_what_one_manifest_asks_for_is_not():
    driver = stack("r0", "r1")
    driver.state(adapter(), adapter("poet"))
    asked = {one.ref.name: one.instance for one in checks(driver)}
    for name, instance in asked.items():
        driver.certify(name, instance=instance)
    news(driver, "r0", digest=PIRATE)
    for name in ("pirate", "poet"):
        driver.enqueue(name, digest=PIRATE, adapter=f"default/{name}")
        assert driver.where(name) == "r1"
    driver = stack("r0", "r1")
    driver.state(adapter(), adapter("poet"))
    asked = {one.ref.name: one for one in checks(driver)}
    first = asked["pirate"]
    other = "r1" if first.instance == "r0" else "r0"
    refuse(driver, first.instance, failure=DIFFERS)
    driver.certify(instance=other)
    driver.certify("poet", instance=asked["poet"].instance)
    runners = driver.scheduler.runners
    assert not runners[first.instance].may_serve(PIRATE, "default/pirate")
    assert runners[first.instance].may_serve(PIRATE, "default/poet")


def test_what_a_runner_has_refused_for_an_earlier_manifest_it_may_serve_under_the_next_one():
    strict = RevisionKey(source="file:///adapters/pirate", content_stamp="1", refuses_mismatch=True)
    driver = stack("r0", "r1", "r2")
    driver.state(adapter(revision=strict))
    for _ in range(2):
        (one,) = checks(driver)
        refuse(driver, one.instance, failure=DIFFERS)
    (one,) = checks(driver)
    driver.certify(instance=one.instance, certificate=AGREES)
    assert may_serve(driver) == {one.instance}
    driver.state(adapter(revision=replace(strict, refuses_mismatch=False)))
    driver.wait(60)
    assert may_serve(driver) == {one.instance}, "the earlier one still serves"
    (warned,) = checks(driver)
    driver.certify(instance=warned.instance, certificate=DIFFERENT)
    assert may_serve(driver) == {"r0", "r1", "r2"}
    assert not status(driver).certificate.warnings


def test_what_a_runner_has_refused_for_a_manifest_goes_with_it():
    driver = stack("r0", "r1")
    driver.state(adapter(), adapter("poet"))
    (first, other) = checks(driver)
    (first,) = (one for one in (first, other) if one.ref.name == "pirate")
    refuse(driver, first.instance, failure=DIFFERS)
    (second,) = checks(driver)
    driver.certify(instance=second.instance)
    driver.enqueue("a", digest=PIRATE, adapter="default/pirate")
    driver.state(adapter("poet"))
    assert may_serve(driver) == {second.instance}, "a request still uses it"
    driver.finish("a")
    assert may_serve(driver) == {"r0", "r1"}
    assert not driver.scheduler.runners[InstanceName(first.instance)].refused.failures


def may_serve(driver: SchedulerDriver) -> set[str]:
    return {one.instance for one in driver.scheduler.runners.values() if one.may_serve(PIRATE, "default/pirate")}


def test_a_runner_whose_recorded_answers_agree_since_refuses_it_no_longer():
    """As with a later data type. Nothing else is proved by default."""
    driver = stack("r0", "r1")
    driver.state(adapter())
    (first,) = checks(driver)
    refuse(driver, first.instance, failure=DIFFERS)
    (second,) = checks(driver)
    driver.certify(instance=second.instance, certificate=AGREES)
    for certificate, may in ((UNPROVED, {second.instance}), (AGREES, {"r0", "r1"})):
        news(driver, first.instance, None, stage=AdapterStage.CERTIFIED, certificate=certificate)
        assert may_serve(driver) == may


def test_who_proves_nothing_is_asked_again_once_nobody_is_left_that_has_refused():
    driver = stack("motet", "vllm")
    driver.state(adapter())
    if checks(driver)[0].instance == "vllm":
        driver.wait(driver.scheduler.config.load_retry)
    refuse(driver, "motet", failure=DIFFERS)
    for one in checks(driver):
        driver.certify(instance=one.instance, certificate=UNPROVED)
    driver.wait(1)
    assert status(driver).failure == DIFFERS
    driver.detach("motet")
    driver.wait(driver.scheduler.config.forget_runner)
    asked = checks(driver)
    driver.wait(1)
    (again,) = asked + checks(driver)
    assert again.instance == "vllm"
    assert status(driver).failure == DIFFERS, "it says why until it serves"
    driver.certify(instance="vllm", certificate=UNPROVED)
    assert published(driver)["pirate"].digest == PIRATE


def test_a_check_ends_if_the_second_runner_goes():
    driver = stack("r0", "r1")
    driver.state(adapter())
    (first,) = checks(driver)
    refuse(driver, first.instance)
    (second,) = checks(driver)
    driver.detach(second.instance)
    driver.wait(0.1)
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    assert report(driver).failure == WRONG
    driver.attach(second.instance)
    assert [one.instance for one in checks(driver)] == [second.instance]
    driver.certify(instance=second.instance)
    assert published(driver)["pirate"].digest == PIRATE


def test_another_runner_is_asked_if_the_first_one_does_not_answer():
    driver = stack("r0", "r1")
    driver.state(adapter())
    (first,) = checks(driver)
    driver.wait(driver.scheduler.config.load_retry)
    (second,) = checks(driver)
    assert {first.instance, second.instance} == {"r0", "r1"}


def works(driver: SchedulerDriver, order: effects.EnsureAdapter, fetched: int = 0):
    return driver.certify(
        digest=Digest(""),
        ref=order.ref,
        instance=order.instance,
        order=order.order,
        stage=AdapterStage.NONE,
        certificate=None,
        bytes=fetched,
    )


def test_a_runner_that_only_says_that_it_is_at_work_holds_up_no_check_for_ever():
    driver = stack("r0", "r1")
    driver.state(adapter())
    (first,) = checks(driver)
    asked = []
    for _ in range(2 * int(driver.scheduler.config.check_patience)):
        works(driver, first)
        asked += checks(driver)
        driver.wait(1)
        asked += checks(driver)
    second = asked[0]
    assert second.instance != first.instance
    driver.certify(instance=second.instance, order=second.order)
    assert published(driver)["pirate"].digest == PIRATE


def test_a_download_that_goes_on_is_not_ordered_elsewhere_however_long_it_lasts():
    driver = stack("r0", "r1")
    driver.state(adapter())
    (first,) = checks(driver)
    for second in range(2 * int(driver.scheduler.config.check_patience)):
        works(driver, first, fetched=second // 200 + 1)
        assert not checks(driver)
        driver.wait(1)
        assert not checks(driver)


@pytest.mark.parametrize("failure", [WRONG, DIFFERS])
def test_a_runner_that_proves_nothing_does_not_outvote_one_that_has_refused(failure):
    """As one of vLLM in a group with one of Motet"""
    driver = stack("motet", "vllm")
    driver.state(adapter())
    (first,) = checks(driver)
    if first.instance == "vllm":
        driver.wait(driver.scheduler.config.load_retry)
        (first,) = checks(driver)
    refuse(driver, "motet", failure=failure)
    asked = checks(driver)
    for one in asked:
        driver.certify(instance=one.instance, certificate=UNPROVED)
    driver.wait(1)
    assert status(driver).state is AdapterReadiness.FAILED
    assert status(driver).failure == failure
    driver.attach("another")
    (third,) = checks(driver)
    assert third.instance == "another"
    driver.certify(instance="another")
    assert published(driver)["pirate"].digest == PIRATE


def test_what_serves_where_nothing_is_proved_stays_there_with_a_warning_once_a_proof_has_failed():
    driver = stack("vllm")
    driver.state(adapter())
    driver.certify(instance="vllm", certificate=UNPROVED)
    driver.attach("motet")
    for _ in range(3):
        news(driver, "motet")
        for one in checks(driver):
            driver.certify(instance=one.instance, certificate=UNPROVED)
        driver.wait(60)
        assert not checks(driver), "vLLM has told all that it can"
    (warning,) = status(driver).certificate.warnings
    assert warning.startswith("its proof has failed on motet")
    driver.enqueue("a", digest=PIRATE)
    assert driver.where("a") == "vllm"
    state = driver.scheduler.adapters.by_name[adapter().ref.object].newest
    assert state.standing is Standing.DOUBTED


def test_orders_that_are_never_answered_hold_up_no_other_adapter():
    driver = stack("r0")
    names = [f"a{number}" for number in range(2 * CHECKS_AT_ONCE)]
    driver.state(*map(adapter, names))
    asked = {one.ref.name for one in checks(driver)}
    for _ in range(3):
        driver.wait(driver.scheduler.config.load_retry)
        asked |= {one.ref.name for one in checks(driver)}
    assert asked == set(names)


def test_a_runner_that_is_at_work_on_many_checks_for_long_gets_no_more_until_one_ends():
    driver = stack("r0")
    driver.state(*(adapter(f"a{n}", namespace=["default", "b"][n % 2]) for n in range(2 * MAX_CHECKS_AT_WORK)))
    at_work = {one.ref.name: one for one in checks(driver)}
    for _ in range(6 * int(driver.scheduler.config.check_patience) // 5):
        for one in [*at_work.values()]:
            works(driver, one)
            at_work |= {one.ref.name: one for one in checks(driver)}
        driver.wait(5)
        at_work |= {one.ref.name: one for one in checks(driver)}
    assert len(at_work) == MAX_CHECKS_AT_WORK
    ended = next(one for one in at_work.values() if one.ref.namespace == "default")
    driver.certify(ref=ended.ref, instance="r0", order=ended.order)
    (another,) = checks(driver)
    assert another.ref.name not in at_work
    driver.wait(driver.scheduler.config.load_retry)
    assert len(checks(driver)) == CHECKS_AT_ONCE, "it says no more that it is at work"


def test_checks_of_a_namespace_that_take_long_leave_some_to_others():
    driver = stack("r0")
    slow = [adapter(f"a{number}") for number in range(2 * MAX_CHECKS_AT_WORK)]
    driver.state(*slow)
    at_work = {one.ref.name: one for one in checks(driver)}
    for _ in range(6 * int(driver.scheduler.config.check_patience) // 5):
        for one in [*at_work.values()]:
            works(driver, one)
            at_work |= {one.ref.name: one for one in checks(driver)}
        driver.wait(5)
        at_work |= {one.ref.name: one for one in checks(driver)}
    assert len(at_work) == MAX_CHECKS_OF_A_LINE
    driver.state(*slow, adapter("another", namespace="other"))
    assert [one.ref.name for one in checks(driver)] == ["another"]


def test_a_late_answer_counts():
    driver = stack("r0")
    names = [f"a{number}" for number in range(2 * CHECKS_AT_ONCE)]
    driver.state(*map(adapter, names))
    late = checks(driver)[0]
    driver.wait(driver.scheduler.config.load_retry)
    assert late.ref.name not in {one.ref.name for one in checks(driver)}
    driver.certify(late.ref.name, order=late.order)
    assert published(driver)[late.ref.name].digest == PIRATE


def test_what_serves_stays_while_the_runner_that_proves_it_is_away():
    driver = serving("r0", "r1")
    driver.detach("r1")
    news(driver, "r0")
    assert published(driver)["pirate"].digest == PIRATE
    driver.wait(1)
    told = report(driver)
    assert (told.failure, told.checking) == (None, False)
    (warning,) = told.certificate.warnings
    assert warning.startswith("its proof has failed on r0")
    assert WRONG.message in warning
    driver.attach("r1")
    assert [one.instance for one in checks(driver)] == ["r1"]
    driver.certify(instance="r1")
    assert published(driver)["pirate"].digest == PIRATE


@pytest.mark.parametrize("proved", [True, False], ids=["proved since", "not since"])
def test_what_only_the_runner_proved_that_is_forgotten_does_not_stay_in_service(proved):
    driver = serving("r0", "r1")
    if proved:
        news(driver, "r0")
        driver.certify(instance="r1")
        driver.detach("r1")
    else:
        driver.detach("r1")
        news(driver, "r0")
    assert published(driver)["pirate"].digest == PIRATE
    driver.wait(driver.scheduler.config.forget_runner)
    saved = driver.of(effects.SaveCatalog)
    driver.wait(1)
    saved += driver.of(effects.SaveCatalog)
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    assert (status(driver).serving, status(driver).failure) == ("", WRONG)
    assert any(one.outdates for one in saved)


def test_what_all_that_are_left_refuse_is_withdrawn_once_the_pool_is_to_have_no_more():
    driver = serving("r0", "r1")
    driver.state(adapter(), pools=(pool(replicas=2),))
    driver.detach("r1")
    news(driver, "r0")
    driver.wait(2 * driver.scheduler.config.forget_runner)
    assert published(driver)["pirate"].digest == PIRATE
    driver.state(adapter(), pools=(pool(replicas=1),))
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED


def test_after_a_takeover_what_all_that_have_come_refuse_is_withdrawn_once_the_others_are_not_awaited():
    saved = serving("r0", "r1").scheduler.catalog_to_save()
    successor = SchedulerDriver(saved=saved, now=5000.0)
    successor.gateway()
    successor.attach("r0", refused={PIRATE: WRONG})
    successor.wait(1)
    assert status(successor).serving == PIRATE
    assert successor.scheduler.look_from() <= 5000 + successor.scheduler.config.forget_runner
    successor.wait(successor.scheduler.config.forget_runner)
    assert (status(successor).serving, status(successor).failure) == ("", WRONG)


def test_a_group_that_lacks_a_runner_withdraws_nothing():
    driver = serving("r0")
    driver.state(adapter(), pools=(pool(replicas=2),))
    news(driver, "r0")
    assert published(driver)["pirate"].digest == PIRATE
    driver.attach("r1")
    assert [one.instance for one in checks(driver)] == ["r1"]
    refuse(driver, "r1")
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED


def test_after_a_takeover_what_serves_stays_until_the_runners_from_before_are_back():
    saved = serving("r0", "r1").scheduler.catalog_to_save()
    successor = SchedulerDriver(saved=saved, now=5000.0)
    successor.gateway()
    successor.attach("r0", resident=resident(PIRATE))
    successor.wait(1)
    news(successor, "r0")
    assert published(successor)["pirate"].digest == PIRATE
    successor.attach("r1", resident=resident(PIRATE))
    assert [one.instance for one in checks(successor)] == ["r1"]


def test_what_is_withdrawn_is_saved_so_that_a_successor_does_not_serve_it():
    driver = serving("r0")
    news(driver, "r0")
    assert [one.outdates for one in driver.of(effects.SaveCatalog)] == [True]
    (saved,) = driver.scheduler.catalog_to_save().adapters
    assert saved.serving is None
    both = serving("r0", "r1")
    news(both, "r0")
    assert not both.of(effects.SaveCatalog)
    refuse(both, "r1")
    assert [one.outdates for one in both.of(effects.SaveCatalog)] == [True]


def test_what_serves_beside_a_newer_revision_that_failed_is_judged_too():
    driver = serving("r0")
    driver.state(adapter(stamp="2"))
    driver.wait(60)
    refuse(driver, "r0", failure=Failure("adapter_incompatible", "no config"))
    news(driver, "r0")
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    told = report(driver)
    assert (told.serving, told.failure.code) == ("", "adapter_incompatible")


def test_what_is_doubted_while_a_newer_revision_is_checked_is_asked_for_once_that_has_failed():
    driver = serving("r0", "r1")
    driver.state(adapter(stamp="2"))
    driver.wait(60)
    (newer,) = checks(driver)
    news(driver, "r0")
    assert published(driver)["pirate"].digest == PIRATE
    refuse(driver, newer.instance, failure=Failure("adapter_incompatible", "no config"))
    (asked,) = checks(driver)
    assert (asked.instance, asked.expected_digest) == ("r1", PIRATE)
    driver.certify(instance="r1")
    assert published(driver)["pirate"].digest == PIRATE
    told = status(driver)
    assert (told.serving, told.failure.code) == (PIRATE, "adapter_incompatible")


def test_what_moves_nothing_any_more_is_withdrawn_once_all_say_so():
    driver = serving("r0", "r1")
    news(driver, "r0", NO_EFFECT)
    assert published(driver)["pirate"].digest == PIRATE
    refuse(driver, "r1", failure=NO_EFFECT)
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    assert (report(driver).serving, report(driver).failure) == ("", NO_EFFECT)


def test_what_serves_is_withdrawn_once_more_runners_refuse_it_than_its_state_remembers():
    runners = [f"r{number}" for number in range(MAX_REFUSED_BY + 2)]
    driver = serving(*runners)
    for runner in runners[:-1]:
        news(driver, runner)
    assert published(driver)["pirate"].digest == PIRATE
    news(driver, runners[-1])
    assert published(driver)["pirate"].state is AdapterReadiness.FAILED
    assert (status(driver).serving, status(driver).failure) == ("", WRONG)


def test_what_serves_is_withdrawn_once_the_one_of_many_runners_is_forgotten_that_does_not_refuse_it():
    runners = [f"r{number}" for number in range(MAX_REFUSED_BY + 2)]
    driver = serving(*runners)
    for runner in runners[:-1]:
        news(driver, runner)
    driver.detach(runners[-1])
    driver.wait(driver.scheduler.config.forget_runner)
    driver.wait(1)
    assert status(driver).serving == ""


def test_a_runner_that_cannot_check_what_is_doubted_takes_it_out_of_no_service():
    for failure, again in ((Failure("adapter_error", "no disk"), 0), (Failure("adapter_fetch_failed", "away", 5.0), 1)):
        driver = serving("r0", "r1")
        news(driver, "r0")
        refuse(driver, "r1", failure=failure)
        assert published(driver)["pirate"].digest == PIRATE
        assert status(driver).failure is None
        driver.wait(6)
        assert len(checks(driver)) == again


def test_a_runner_whose_other_kernels_prove_what_its_first_ones_did_not_refuses_it_no_longer():
    driver = serving("r0", "r1")
    news(driver, "r0")
    driver.certify(instance="r1")
    certificate = Certificate(digest=PIRATE, rank=8, proved_by=("cpp",))
    news(driver, "r0", None, stage=AdapterStage.DEVICE, certificate=certificate)
    driver.wait(1)
    assert not report(driver).certificate.warnings
    news(driver, "r1")
    assert published(driver)["pirate"].digest == PIRATE, "r0 has proved it since"
