"""`placement.maxReplicas`: the most runners that serve an adapter."""

import pytest

from motet.domain import InstanceName, RequestId, Tenant
from motet.runner_info import Capacity, RequestClass, RunnerIdentity, Tier
from motet_scheduler.policy import effects, events
from motet_scheduler.policy.adapters.limits import AdapterLimits
from motet_scheduler.policy.adapters.table import AdapterTable
from motet_scheduler.policy.placement import Placer
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import BaseModel, GroupName
from tests.scheduler.builders import GROUP, PIRATE, SchedulerDriver, adapter, entry, ready, reserved, resident

WAITS = "it waits for a runner that has its adapter, because placement.maxReplicas allows no more"


def limited(most: int, *, runners: int = 3, examined: int = 32, **capacity: int) -> SchedulerDriver:
    """Runners that serve one request at a time, and an adapter that at most `most` of them may serve."""
    driver = ready(tenants_examined=examined)
    for n in range(runners):
        driver.attach(f"r{n}", **({"max_sequences": 1} | capacity))
    driver.state(adapter(max_replicas=most))
    driver.certify(instance=driver.of(effects.EnsureAdapter)[0].instance)
    return driver


def ask(driver: SchedulerDriver, *names: str, **how: object) -> None:
    for name in names:
        driver.enqueue(name, digest=PIRATE, adapter="default/pirate", **how)


def identity(driver: SchedulerDriver, instance: str) -> events.RunnerIdentity:
    return driver.scheduler.runners[InstanceName(instance)].identity


def test_the_next_request_waits_for_a_runner_that_has_the_adapter():
    driver = limited(2)
    ask(driver, "a", "b", "c")
    assert [driver.where(name) for name in "abc"] == ["r2", "r1", ""]
    assert [effect.why for effect in driver.of(effects.SendPosition)] == [f"{WAITS}: every batch is full"]
    driver.enqueue("base", tenant="other")
    assert driver.where("base") == "r0", "only the adapter is limited"
    driver.finish("a")
    assert driver.where("c") == "r2"


def test_a_runner_keeps_its_place_after_its_last_request():
    """From the order to load until its next report the scheduler only knows that the runner will have the adapter."""
    driver = limited(1, max_sequences=2)
    ask(driver, "a")
    driver.finish("a")
    driver.enqueue("busy", tenant="other")
    driver.enqueue("busier", tenant="other")
    ask(driver, "b")
    assert driver.where("b") == ""
    driver.finish("busy")
    assert driver.where("b") == "r2"


@pytest.mark.parametrize("goes", ["drains", "is down", "dropped the adapter", "may be on more"])
def test_when_a_runner_with_the_adapter_goes_another_one_takes_its_place(goes):
    driver = limited(1, runners=2)
    driver.report("r0", resident=resident(PIRATE))
    driver.enqueue("busy", tenant="other")
    driver.enqueue("busier", tenant="other", prompt=1, max_tokens=100 * 16)
    assert driver.where("busier") == "r0"
    driver.finish("busy")
    ask(driver, "a")
    assert driver.where("a") == ""
    match goes:
        case "drains":
            driver.send(events.DrainsDeclared((events.DrainRequested(identity(driver, "r0"), 10.0),)))
        case "is down":
            driver.detach("r0")
        case "dropped the adapter":
            driver.report("r0")
        case _:
            driver.state(adapter(max_replicas=2))
    if goes != "dropped the adapter":  # that was a report
        driver.report("r1")
    assert driver.where("a") == "r1"


def test_a_lower_limit_holds_for_the_next_request():
    driver = limited(3)
    for n in range(3):
        driver.report(f"r{n}", resident=resident(PIRATE))
    ask(driver, "a")
    driver.state(adapter(max_replicas=1))
    ask(driver, "b", "c")
    assert [driver.where(name) for name in "abc"] == ["r2", "r0", ""]


def test_an_adapter_in_host_memory_counts_only_when_it_is_used():
    driver = limited(1, runners=2)
    driver.report("r0", resident=resident(PIRATE, Tier.HOST))
    driver.enqueue("busy", tenant="other")
    driver.enqueue("busier", tenant="other")
    driver.finish("busy")
    ask(driver, "a")
    assert driver.where("a") == "r1"


def test_a_request_that_no_runner_with_the_adapter_can_hold_goes_elsewhere():
    driver = ready()
    driver.attach("small", pages=4)
    driver.state(adapter(max_replicas=1))
    driver.certify(instance="small")
    driver.attach("large")
    driver.report("small", resident=resident(PIRATE))
    ask(driver, "a", max_tokens=500)
    assert driver.where("a") == "large"


def test_an_overdue_request_waits_for_a_runner_that_has_its_adapter():
    driver = ready(max_passed_over=1)
    driver.attach("r0")
    driver.attach("r1")
    driver.state(adapter(max_replicas=1))
    driver.certify(instance=driver.of(effects.EnsureAdapter)[0].instance)
    driver.report("r0", resident=resident(PIRATE))
    driver.enqueue("on r1", prompt=1, max_tokens=15)
    driver.enqueue("on r0", prompt=1, max_tokens=100 * 16, tenant="b")
    ask(driver, "large", prompt=1, max_tokens=99 * 16, tenant="large")
    for n in range(2):
        driver.enqueue(f"small{n}", prompt=1, max_tokens=15, tenant=f"c{n}")
    assert [driver.where(f"small{n}") for n in range(2)] == ["r1", "r1"], "r0 is reserved, though more is missing there"
    driver.finish("on r0")
    assert driver.where("large") == "r0"


def test_a_runner_is_reserved_that_may_serve_the_overdue_request_though_another_was_before():
    driver = ready(max_passed_over=1)
    for name, used in (("r0", 40), ("r1", 10), ("r2", 60)):
        driver.attach(name, live=(entry(f"on {name}", used),))
    driver.state(adapter(max_replicas=1))
    driver.certify(instance=driver.of(effects.EnsureAdapter)[0].instance)
    ask(driver, "large", prompt=1, max_tokens=95 * 16)
    driver.enqueue("small", prompt=1, max_tokens=15, tenant="other")
    assert reserved(driver) == {"r1": "large"}, "it lacks least"
    ask(driver, "urgent", prompt=1, max_tokens=15, tenant="third", request_class=RequestClass.INTERACTIVE)
    holder = driver.where("urgent")
    assert holder != "r1"
    driver.report("r0" if holder == "r2" else "r2", entry("any", 40))
    assert reserved(driver) == {}, "only one has the adapter, no other may serve it, and nothing was placed there since"
    driver.report("r1", entry("any", 100))
    driver.enqueue("small too", prompt=1, max_tokens=15, tenant="other")
    assert reserved(driver) == {holder: "large"}


def test_overdue_requests_that_wait_for_different_runners_have_a_reservation_each():
    """The first waits for the only runner that may serve its adapter; the second must not starve behind it."""
    driver = ready(max_passed_over=1)
    driver.attach("r0", live=(entry("on r0", 50),))
    driver.attach("r1", live=(entry("on r1", 90),))
    driver.state(adapter(max_replicas=1))
    driver.certify(instance=driver.of(effects.EnsureAdapter)[0].instance)
    driver.report("r1", entry("on r1", 90), resident=resident(PIRATE))
    ask(driver, "pirate", "pirate too", prompt=1, max_tokens=99 * 16)
    driver.enqueue("large", prompt=1, max_tokens=80 * 16, tenant="b")
    driver.enqueue("large too", prompt=1, max_tokens=80 * 16, tenant="c")
    for n in range(2):
        driver.enqueue(f"small{n}", prompt=1, max_tokens=15, tenant=f"t{n}")
    assert [driver.where(f"small{n}") for n in range(2)] == ["r1", ""]
    assert reserved(driver) == {"r0": "large", "r1": "pirate"}
    driver.report("r0", entry("on r0", 1))
    assert driver.where("large") == "r0"
    driver.finish("small0")
    driver.report("r1", entry("on r1", 1), resident=resident(PIRATE))
    assert driver.where("pirate") == "r1"


def test_a_request_that_waits_for_a_runner_with_its_adapter_holds_back_no_other_of_its_tenant():
    driver = limited(1, runners=2)
    ask(driver, "a", "b", "c")
    driver.enqueue("base")
    assert [driver.where(name) for name in ("a", "b", "base")] == ["r1", "", "r0"]
    driver.finish("a")
    assert [driver.where(name) for name in "bc"] == ["r1", ""], "and they keep their order"


def test_requests_that_wait_when_a_limit_comes_hold_back_no_other_of_their_tenant():
    driver = limited(0, runners=2)
    ask(driver, "a")
    driver.enqueue("busy", tenant="other")
    ask(driver, "b", deadline=9.0)
    driver.enqueue("base")
    driver.state(adapter(max_replicas=1))
    driver.finish("busy")
    assert [driver.where(name) for name in ("a", "b", "base")] == ["r1", "", "r0"]
    driver.state(adapter())
    driver.enqueue("younger")
    driver.finish("base")
    assert [driver.where(name) for name in ("b", "younger")] == ["r0", ""]


def test_a_limit_that_comes_ends_no_deadline():
    driver = limited(0, runners=1)
    ask(driver, "a")
    ask(driver, "b", deadline=9.0)
    driver.state(adapter(max_replicas=1))
    driver.wait(10.0)
    assert [refused.request for refused in driver.of(effects.SendRefused)] == ["b"]


def test_another_adapter_with_the_same_bytes_has_its_own_limit():
    driver = limited(1)
    driver.state(adapter(max_replicas=1), adapter("twin", namespace="acme"))
    driver.certify(
        "twin", instance=driver.of(effects.EnsureAdapter)[0].instance, ref=adapter("twin", namespace="acme").ref
    )
    ask(driver, "a", "b")
    driver.enqueue("c", digest=PIRATE, adapter="acme/twin", tenant="other")
    assert (driver.where("b"), driver.where("c")) == ("", "r1")


def crowd(driver: SchedulerDriver, count: int) -> None:
    """Requests of many tenants that wait for the adapter's only runner, r1; r0 is busy with another request."""
    ask(driver, "a")
    driver.enqueue("busy", tenant="other")
    for n in range(count):
        ask(driver, f"w{n}", tenant=f"t{n}")
    assert (driver.where("a"), driver.where("busy")) == ("r1", "r0")


def test_tenants_that_wait_for_a_runner_with_their_adapter_hold_back_nobody_behind_them():
    driver = limited(1, runners=2, examined=2)
    crowd(driver, 5)
    driver.enqueue("behind", tenant="later")
    driver.finish("busy")
    assert driver.where("behind") == "r0"
    driver.finish("a")
    assert driver.where("w0") == "r1", "and they keep their order"


def tried(monkeypatch):
    """The names of those for which a runner is looked for from now on."""
    names, place = [], Placer._place  # noqa: SLF001
    monkeypatch.setattr(Placer, "_place", lambda *args: names.append(args[2].id) or place(*args))
    return names


def test_requests_that_wait_for_a_runner_are_looked_at_only_when_something_changes_there(monkeypatch):
    driver = limited(1, runners=2)
    crowd(driver, 40)
    looked_at = tried(monkeypatch)
    driver.report("r0")
    driver.finish("busy")
    assert not looked_at
    driver.finish("a")
    assert looked_at == ["w0"], "the next has no room"


def test_many_that_may_go_elsewhere_now_are_looked_at_in_parts(monkeypatch):
    """However many wait, no event looks at more than some; those behind them come with the next events."""
    driver = limited(1, runners=2, examined=4)
    crowd(driver, 20)
    looked_at = tried(monkeypatch)
    driver.state(adapter(max_replicas=2))
    assert looked_at
    while looked_at:
        assert len(looked_at) <= 4
        looked_at.clear()
        driver.wait(0.01)
    driver.finish("busy")
    assert driver.where("w0") == "r0"


def runners_of_each_kind() -> tuple[AdapterLimits, dict[InstanceName, Runner]]:
    """Two groups and two base models: each runner has the adapter, and each of the two names may be on one of them."""
    table, runners = AdapterTable(), dict[InstanceName, Runner]()
    limits = AdapterLimits(table, runners)
    limits.state([adapter(max_replicas=1), adapter("twin", max_replicas=2)])
    for name, group, base in (("r0", GROUP, "old"), ("r1", GROUP, "new"), ("r2", "default/other", "new")):
        identity_ = RunnerIdentity(instance=name, incarnation="1", pool="p", group=group)
        moved = lambda _, digest: limits.adapters_moved([digest])  # noqa: E731
        runner = Runner(identity_, "", Capacity(pages=100), 1.0, table=table, adapter_moved=moved)
        runners[runner.instance] = runner
        runner.base = BaseModel(digest=base)
        runner.adapters.replace(resident(PIRATE))
    return limits, runners


def limited_request(group: str = GROUP, base: str = "", name: str = "pirate") -> Request:
    return Request(
        id=RequestId("a"),
        gateway="g0",
        tenant=Tenant("acme"),
        group=GroupName(group),
        digest=PIRATE,
        adapter=f"default/{name}",
        base=base,
        request_class=RequestClass.STANDARD,
        prompt_tokens=1,
        max_tokens=1,
        asked_at=0.0,
    )


def served_by(limits: AdapterLimits, **of: str) -> list[str] | None:
    found = limits.holders_at_limit(limited_request(**of))
    return None if found is None else [runner.instance for runner in found]


def test_requests_of_other_groups_base_models_and_names_have_another_answer() -> None:
    limits, _ = runners_of_each_kind()
    for _ in range(2):
        assert served_by(limits, base="old") == ["r0"]
        assert served_by(limits, base="new") == ["r1"]
        assert served_by(limits) == ["r0"]
        assert served_by(limits, group="default/other") == ["r2"]
        assert served_by(limits, name="twin") == ["r0", "r1"]
        assert served_by(limits, base="new", name="twin") is None


def test_an_answer_is_kept_for_all_that_ask_alike_until_a_runner_or_a_limit_changes() -> None:
    limits, runners = runners_of_each_kind()
    assert served_by(limits) == ["r0"]
    kept = limits.holders_at_limit(limited_request())
    assert limits.holders_at_limit(limited_request()) is kept, "it is worked out once"
    runners[InstanceName("r0")].adapters.replace({})
    assert served_by(limits) == ["r1"]
    runners[InstanceName("r0")].adapters.replace(resident(PIRATE))
    assert served_by(limits) == ["r0"]
    limits.state([adapter(max_replicas=2), adapter("twin", max_replicas=2)])
    assert served_by(limits) == ["r0", "r1"]
    assert served_by(limits, group="default/other") is None
