"""Adapters with a chat template of their own: what gateways are told, and who brings a template that no runner has."""

from dataclasses import replace

import pytest

from motet.api.v1 import scheduler_pb2
from motet.domain import Digest
from motet.held_templates import MAX_HELD_TEMPLATES
from motet.runner_info import Failure, Tier
from motet_scheduler.conversion import read_certificate, read_held
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.revision_state import MAX_REFUSED_BY
from motet_scheduler.policy.template_loads import MAX_TEMPLATES_DECIDED, TEMPLATES_AT_ONCE, TemplateLoads
from motet_scheduler.policy.values import AdapterRef, AdapterStage, Certificate
from tests.scheduler.builders import GROUP, PIRATE, POET, adapter, ready
from tests.scheduler.test_proofs import news

FAILURE = Failure("adapter_fetch_failed", "the source is away", retry_after=10)
TEMPLATE = "sha256:" + "7" * 64


def with_template(digest=PIRATE, template=TEMPLATE):
    return Certificate(digest=digest, rank=8, template_digest=template)


def loads(driver):
    return [one for one in driver.of(effects.EnsureAdapter) if one.stage is AdapterStage.DEVICE]


def held(driver, *digests, gateway="g0", group=GROUP):
    """And the tick that comes next"""
    driver.send(events.RequestsHeld(gateway, ((group, len(digests)),), tuple((group, one) for one in digests)))
    driver.wait(0)


def serving():
    driver = ready()
    driver.attach("r0")
    driver.state(adapter())
    driver.certify(certificate=with_template())
    return driver


def test_gateways_are_told_the_template_with_the_digest_that_it_belongs_to():
    driver = serving()
    (entry,) = driver.scheduler.catalog.adapters
    assert (entry.digest, entry.template_digest) == (PIRATE, TEMPLATE)
    driver.state(adapter(stamp="2"))
    (entry,) = driver.scheduler.catalog.adapters
    assert (entry.digest, entry.template_digest) == (PIRATE, TEMPLATE), "until the new revision serves"
    driver.wait(60)
    driver.certify(digest=POET, certificate=with_template(POET, ""))
    (entry,) = driver.scheduler.catalog.adapters
    assert (entry.digest, entry.template_digest) == (POET, "")


def test_a_newer_check_of_what_serves_names_a_template_that_older_ones_did_not_look_for():
    driver = ready()
    driver.attach("r0")
    driver.state(adapter())
    driver.certify(certificate=Certificate(digest=PIRATE, rank=8, checker=10))
    driver.enqueue("q", digest=PIRATE, tenant="default")
    load = {"stage": AdapterStage.DEVICE, "ordered_stage": AdapterStage.DEVICE}
    for checker, template in ((10, ""), (11, TEMPLATE)):
        newer = Certificate(digest=PIRATE, rank=8, checker=checker, template_digest=TEMPLATE)
        driver.certify(certificate=newer, **load)
        driver.wait(2)
        (entry,) = driver.scheduler.catalog.adapters
        assert entry.template_digest == template


def test_an_adapter_whose_template_no_runner_has_is_loaded_once():
    driver = serving()
    assert not loads(driver)
    held(driver, PIRATE)
    (order,) = loads(driver)
    assert (order.instance, order.expected_digest) == ("r0", PIRATE)
    held(driver, PIRATE)
    held(driver, PIRATE, gateway="g1")
    assert not loads(driver)
    driver.certify(stage=AdapterStage.DEVICE, ordered_stage=AdapterStage.DEVICE)
    driver.report("r0", resident={PIRATE: Tier.DEVICE})
    driver.wait(60)
    assert not loads(driver)


def test_no_load_where_a_runner_has_its_files_or_nobody_waits():
    driver = serving()
    driver.report("r0", resident={PIRATE: Tier.DISK})
    held(driver, PIRATE)
    assert not loads(driver), "the gateway finds it there"
    driver.report("r0", resident={})
    held(driver)
    driver.wait(60)
    assert not loads(driver)


def test_no_load_on_a_runner_that_refuses_the_adapter_however_many_do():
    names = [f"r{number:02}" for number in range(MAX_REFUSED_BY + 2)]
    driver = ready()
    for name in names:
        driver.attach(name)
    driver.state(adapter())
    (asked,) = (one for one in driver.of(effects.EnsureAdapter) if one.stage is AdapterStage.CERTIFIED)
    driver.certify(instance=asked.instance, certificate=with_template())
    driver.report(asked.instance, resident={POET: Tier.DISK})
    for name in names:
        if name != asked.instance:
            news(driver, name)
    held(driver, PIRATE)
    assert [one.instance for one in loads(driver)] == [asked.instance]


def test_another_runner_gets_it_if_the_one_that_has_its_files_gives_no_template():
    """It is of an earlier version, say, and does not know of templates."""
    driver = serving()
    driver.attach("r1")
    driver.attach("r2")
    driver.report("r0", resident={PIRATE: Tier.DISK})
    held(driver, PIRATE)
    assert not loads(driver), "the gateway may find it there"
    asked = []
    for _ in range(4):
        driver.wait(driver.scheduler.state.config.load_retry)
        for order in loads(driver):
            asked.append(order.instance)
            done = {"stage": AdapterStage.DEVICE, "ordered_stage": AdapterStage.DEVICE, "order": order.order}
            driver.certify(certificate=with_template(), instance=order.instance, **done)
            driver.report(order.instance, resident={PIRATE: Tier.DEVICE})
            assert not loads(driver), "the gateway may find it there now"
    assert asked == ["r1", "r2"]


def test_a_runner_that_comes_is_asked_at_once():
    driver = serving()
    driver.detach("r0")
    held(driver, PIRATE)
    driver.wait(0.1)
    assert not loads(driver)
    driver.attach("r1")
    assert [order.instance for order in loads(driver)] == ["r1"]


def test_of_what_many_wait_for_little_is_looked_at_with_each_event(monkeypatch):
    digests = [Digest(f"sha256:{number:064x}") for number in range(300)]
    driver = ready()
    for number in range(3):
        driver.attach(f"r{number}")
    driver.state(*(adapter(f"a{number}") for number in range(len(digests))))
    for number, digest in enumerate(digests):
        driver.certify(f"a{number}", digest, certificate=with_template(digest))
    looked = []
    is_loading = TemplateLoads._is_loading  # noqa: SLF001
    monkeypatch.setattr(TemplateLoads, "_is_loading", lambda *given: looked.append(0) or is_loading(*given))
    held(driver, *digests)
    assert len(loads(driver)) <= 3 * TEMPLATES_AT_ONCE
    assert 0 < len(looked) <= 2 * MAX_TEMPLATES_DECIDED
    driver.wait(0.1)
    driver.wait(0.1)
    looked.clear()
    for _ in range(10):
        driver.certify("a0", digests[0], certificate=None, stage=AdapterStage.NONE, failure=FAILURE)
    assert len(looked) <= 10, "of the one that has changed"


def test_all_of_many_are_loaded_in_the_end():
    digests = [Digest(f"sha256:{number:064x}") for number in range(MAX_TEMPLATES_DECIDED + 20)]
    names = {digest: f"a{number}" for number, digest in enumerate(digests)}
    driver = ready()
    driver.attach("r0")
    driver.state(*map(adapter, names.values()))
    for digest, name in names.items():
        driver.certify(name, digest, certificate=with_template(digest))
    held(driver, *digests)
    waiting, resident = loads(driver), {}
    while waiting:
        order = waiting.pop(0)
        digest = Digest(order.expected_digest)
        assert digest not in resident
        done = {"stage": AdapterStage.DEVICE, "ordered_stage": AdapterStage.DEVICE, "order": order.order}
        driver.certify(names[digest], digest, **done)
        waiting += loads(driver)
        resident[digest] = Tier.DEVICE
        driver.report("r0", resident=dict(resident))
        waiting += loads(driver)
        driver.wait(0.1)
        waiting += loads(driver)
        assert len(waiting) <= TEMPLATES_AT_ONCE
    assert resident.keys() == set(digests)


def test_whose_source_is_gone_holds_up_no_other_adapter_with_the_same_bytes():
    driver = ready()
    driver.attach("r0")
    driver.state(adapter("gone"), adapter("good"))
    for name in ("gone", "good"):
        driver.certify(name, certificate=with_template())
    held(driver, PIRATE)
    asked = []
    for _ in range(3):
        (order,) = loads(driver)
        asked.append(order.ref.name)
        failed = {"stage": AdapterStage.NONE, "certificate": None, "ordered_stage": AdapterStage.DEVICE}
        driver.certify(order.ref.name, order=order.order, **failed, failure=FAILURE)
        if not loads(driver):
            driver.wait(10)
    assert asked == ["gone", "good", "gone"]


def test_a_load_that_fails_is_tried_again_only_while_a_gateway_waits():
    driver = serving()
    held(driver, PIRATE)
    assert loads(driver)
    failure = {"stage": AdapterStage.NONE, "certificate": None, "ordered_stage": AdapterStage.DEVICE}
    driver.certify(**failure, failure=FAILURE)
    assert not loads(driver)
    driver.wait(11)
    assert loads(driver)
    driver.certify(**failure, failure=FAILURE)
    driver.send(events.GatewayDisconnected("g0"))
    driver.wait(60)
    assert not loads(driver)


def test_only_some_are_loaded_at_once_on_each_runner():
    digests = [Digest(f"sha256:{number:064x}") for number in range(3 * TEMPLATES_AT_ONCE)]
    driver = ready()
    driver.attach("r0")
    driver.state(*(adapter(f"a{number}") for number in range(len(digests))))
    for number, digest in enumerate(digests):
        driver.certify(f"a{number}", digest, certificate=with_template(digest))
    held(driver, *digests)
    first = loads(driver)
    assert len(first) == TEMPLATES_AT_ONCE
    done = first[0]
    driver.certify(
        done.ref.name,
        Digest(done.expected_digest),
        order=done.order,
        stage=AdapterStage.DEVICE,
        ordered_stage=AdapterStage.DEVICE,
    )
    driver.report("r0", resident={Digest(done.expected_digest): Tier.DEVICE})
    driver.wait(1)
    assert len(loads(driver)) == 1


@pytest.mark.parametrize(("namespace", "most_rounds"), [("default", 4), ("other", 1)])
@pytest.mark.parametrize("fails", [True, False])
def test_what_never_comes_holds_up_no_other(namespace, most_rounds, fails):
    """Mutations: what has failed is tried again before what has not been tried; what gets no answer keeps its place; a
    namespace of which much is tried has all places again before another one has one."""
    digests = [Digest(f"sha256:{number:064x}") for number in range(4 * TEMPLATES_AT_ONCE)]
    driver = ready()
    driver.attach("r0")
    driver.state(*(adapter(f"a{number}") for number in range(len(digests))), adapter(namespace=namespace))
    for number, digest in enumerate(digests):
        driver.certify(f"a{number}", digest, certificate=with_template(digest))
    driver.certify(ref=AdapterRef(namespace, "pirate", 1), certificate=with_template())
    held(driver, *digests, PIRATE)
    orders, rounds = loads(driver), 0
    while all(one.expected_digest != PIRATE for one in orders):
        rounds, new = rounds + 1, []
        assert rounds <= most_rounds
        for order in orders if fails else ():
            driver.certify(
                order.ref.name,
                Digest(order.expected_digest),
                order=order.order,
                stage=AdapterStage.NONE,
                ordered_stage=AdapterStage.DEVICE,
                certificate=None,
                failure=replace(FAILURE, retry_after=1),
            )
            new += loads(driver)
        driver.wait(driver.scheduler.state.config.load_retry)
        orders = new + loads(driver)


def test_what_nobody_serves_is_not_loaded():
    driver = serving()
    held(driver, POET)
    held(driver, PIRATE, group="default/other")
    assert not loads(driver)


def test_a_message_names_a_bounded_number_and_a_digest_is_a_digest():
    many = scheduler_pb2.HeldGroup(group=GROUP, templates=[f"sha256:{number}" for number in range(2000)])
    told = read_held("g0", scheduler_pb2.Held(groups=[many]))
    assert len(told.templates) == MAX_HELD_TEMPLATES
    for said in ("sha256:../../x", "x" * 100_000, "sha256:" + "Z" * 64):
        assert read_certificate(scheduler_pb2.Certificate(template_digest=said)).template_digest == ""
    assert read_certificate(scheduler_pb2.Certificate(template_digest=TEMPLATE)).template_digest == TEMPLATE
