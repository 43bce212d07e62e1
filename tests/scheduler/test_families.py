"""The choices of one call go to one runner when they fit there, and to a runner that has their prompt in its cache."""

from hypothesis import given
from hypothesis import strategies as st

from motet.domain import InstanceName, RequestId
from motet.runner_info import Capacity, RequestClass, RunnerIdentity, Tier
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runner_choice import Chosen, choose
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import Estimate, SchedulerConfig
from tests.scheduler.builders import GROUP, PIRATE, SchedulerDriver, adapter, entry, ready, resident

# ------------------------------------------------------------------------------------------------------ parent, choices


def ask(driver: SchedulerDriver, name: str, *, choices: int, **how: object) -> list[str]:
    """A call with several choices. Returns where each was placed."""
    names = [name, *(f"{name}.{number}" for number in range(1, choices))]
    for one in names:
        driver.enqueue(one, choices=choices, parent=RequestId(name) if one != name else None, **how)  # type: ignore[arg-type]
    return [driver.where(one) for one in names]


def test_choices_join_their_parent_although_another_runner_is_fuller():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a", choices=3)
    driver.attach("r1", live=(entry("x", 1), entry("y", 1), entry("z", 1), entry("u", 1)))
    for name in ("a.1", "a.2"):
        driver.enqueue(name, parent=RequestId("a"), choices=3)
    driver.enqueue("b")
    assert [driver.where(name) for name in ("a", "a.1", "a.2", "b")] == ["r0", "r0", "r0", "r1"]


def test_the_first_choice_goes_where_all_of_them_fit():
    driver = ready()
    driver.attach("r0", pages=100)
    driver.attach("r1", pages=14, live=(entry("x", 1),))  # the fullest: it has room for two of them
    assert ask(driver, "a", choices=3) == ["r0"] * 3
    assert ask(driver, "b", choices=1) == ["r0"], "now r0 is the fullest"


def test_the_batch_of_the_first_choices_runner_has_room_for_all_of_them():
    driver = ready()
    driver.attach("r0", max_sequences=8)
    driver.attach("r1", max_sequences=3, live=(entry("x", 1),))
    assert ask(driver, "a", choices=3) == ["r0"] * 3


def test_choices_that_fit_on_no_single_runner_go_anywhere():
    driver = ready()
    driver.attach("r0", pages=10)
    driver.attach("r1", pages=10)
    assert sorted(ask(driver, "a", choices=4)) == ["r0", "r0", "r1", "r1"]


def test_a_choice_that_left_its_parent_is_joined_by_the_next_ones():
    driver = ready()
    driver.attach("r0", pages=5)
    driver.enqueue("a", choices=3)
    driver.attach("r1")
    driver.attach("r2", live=(entry("x", 1), entry("y", 1)))
    driver.enqueue("a.1", parent=RequestId("a"), choices=3)
    driver.attach("r3", live=tuple(entry(f"z{n}", 1) for n in range(9)))
    driver.enqueue("a.2", parent=RequestId("a"), choices=3)
    assert [driver.where(name) for name in ("a", "a.1", "a.2")] == ["r0", "r2", "r2"]


def test_nobody_waits_for_a_parent_that_is_gone():
    driver = ready()
    driver.attach("r0")
    driver.enqueue("a.1", parent=RequestId("a"), choices=2)
    assert driver.where("a.1") == "r0"
    driver.enqueue("b", choices=2)
    driver.finish("b")
    driver.enqueue("b.1", parent=RequestId("b"), choices=2)
    assert driver.where("b.1") == "r0"


def test_a_lost_parent_goes_back_to_its_choices():
    driver = ready()
    driver.attach("r0")
    ask(driver, "a", choices=2)
    driver.attach("r1", live=(entry("x", 1), entry("y", 1), entry("z", 1)))
    driver.lose("a")
    assert driver.where("a") == "r1", "the runner that lost it is avoided for a moment"
    driver.wait(1)
    driver.lose("a", epoch=2)
    assert driver.where("a") == "r0"


def test_choices_of_a_runner_that_is_gone_gather_on_another_one():
    driver = ready()
    driver.attach("r0")
    names = ("a", "a.1", "a.2")
    ask(driver, "a", choices=3)
    driver.attach("r1", live=(entry("x", 1),))
    driver.attach("r2", live=(entry("y", 1), entry("z", 1)))
    driver.detach("r0")
    for name in names:
        driver.lose(name)
    assert {driver.where(name) for name in names} == {"r2"}


def test_after_a_restart_the_choices_of_a_call_still_belong_together():
    driver = SchedulerDriver()
    driver.attach("r0", live=(entry("a", 5),))
    driver.attach("r1", live=(entry("a.1", 5), entry("x", 1), entry("y", 1)))
    driver.gateway("g0", driver.live("a", pages=5), driver.live("a.1", instance="r1", pages=5, parent=RequestId("a")))
    driver.state()
    driver.attach("r2", live=tuple(entry(f"z{n}", 1) for n in range(9)))
    driver.lose("a")
    assert driver.where("a") == "r1"


# ------------------------------------------------------------------------------------------------------- cached prefix

HINTS = tuple(range(1, 17))


def test_a_runner_with_the_prompt_in_its_cache_is_preferred_to_a_fuller_one():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1", live=(entry("x", 1), entry("y", 1)))
    driver.report("r0", cached=HINTS[:3])
    driver.enqueue("a", prefix_hints=HINTS)
    driver.enqueue("b", prefix_hints=(99, *HINTS[:1]))
    assert (driver.where("a"), driver.where("b")) == ("r0", "r0")
    driver.enqueue("c", prefix_hints=(77, 78))
    driver.enqueue("d")
    assert driver.where("c") == driver.where("d")


def test_the_longer_cached_prefix_wins_and_the_last_report_counts():
    driver = ready()
    driver.attach("r0")
    driver.attach("r1")
    driver.report("r0", cached=HINTS[:4])
    driver.report("r1", cached=HINTS[:3])
    driver.enqueue("a", prefix_hints=HINTS)
    assert driver.where("a") == "r0"
    driver.report("r0", entry("a", 5), cached=HINTS[:2])
    driver.enqueue("b", prefix_hints=HINTS)
    assert driver.where("b") == "r1"
    driver.report("r1", entry("b", 5))
    driver.report("r0", entry("a", 5), cached=())
    driver.attach("r2", live=(entry("x", 1), entry("y", 1)))
    driver.enqueue("c", prefix_hints=HINTS)
    assert driver.where("c") == "r2", "nobody has it, so the fullest"


def test_a_cached_prefix_counts_more_than_a_resident_adapter_and_less_than_a_parent():
    driver = ready()
    driver.attach("r0", resident=resident(PIRATE, Tier.HOST))
    driver.attach("r1", resident=resident(PIRATE, Tier.DEVICE))
    driver.state(adapter())
    driver.certify()
    driver.report("r0", cached=HINTS[:1], resident=resident(PIRATE, Tier.HOST))
    driver.enqueue("a", digest=PIRATE, prefix_hints=HINTS, choices=2)
    assert driver.where("a") == "r0"
    driver.report("r1", cached=HINTS, resident=resident(PIRATE, Tier.DEVICE))
    driver.enqueue("a.1", digest=PIRATE, prefix_hints=HINTS, parent=RequestId("a"), choices=2)
    assert driver.where("a.1") == "r0"


def test_a_restarted_runner_has_an_empty_cache():
    driver = ready()
    driver.attach("r0")
    driver.report("r0", cached=HINTS)
    driver.attach("r0", incarnation="2")
    driver.attach("r1", live=(entry("x", 1),))
    driver.enqueue("a", prefix_hints=HINTS)
    assert driver.where("a") == "r1"


# -------------------------------------------------------------------------------------------------------- any situation

SITUATION = st.tuples(
    st.integers(1, 40),  # pages
    st.integers(1, 4),  # sequences at most
    st.lists(st.integers(1, 12), max_size=4),  # promises
    st.integers(0, 16),  # cached pages
)


def runner(name: str, pages: int, most: int, promises: list[int], cached: int) -> Runner:
    made = Runner(
        RunnerIdentity(instance=name, incarnation="1", group=GROUP), "", Capacity(pages=pages, max_sequences=most), 1.0
    )
    for number, promised in enumerate(promises):
        made.record_promise((RequestId(f"{name}-{number}"), 1), promised, PIRATE, 0.0)
    made.cached_prefixes = frozenset(HINTS[:cached])
    return made


@given(st.lists(SITUATION, min_size=1, max_size=5), st.integers(0, 5), st.integers(1, 4), st.integers(1, 100))
def test_hints_and_parents_never_change_whether_a_request_fits(situations, near, choices, max_tokens):
    runners = [runner(f"r{number}", *situation) for number, situation in enumerate(situations)]
    request = Request(
        id=RequestId("a"),
        gateway="g0",
        tenant="acme",
        group=GROUP,
        digest=PIRATE,
        request_class=RequestClass.STANDARD,
        prompt_tokens=16,
        max_tokens=max_tokens,
        estimate=Estimate(),
        asked_at=0.0,
    )
    plain = choose(request, runners, SchedulerConfig(), 1.0)
    request.prefix_hints, request.choices = HINTS, choices
    name = InstanceName(f"r{near}")
    preferred = choose(request, runners, SchedulerConfig(), 1.0, near=name)
    if not isinstance(plain, Chosen):
        assert preferred == plain
        return
    assert isinstance(preferred, Chosen)
    fitting = [
        one
        for one in runners
        if one.sequences < one.max_sequences
        and one.ledger.free >= request.requirement_on(one.capacity, SchedulerConfig()).promise.pages
        and not request.requirement_on(one.capacity, SchedulerConfig()).never
    ]
    assert preferred.runner in fitting
    if any(one.instance == name for one in fitting):
        assert preferred.runner.instance == name
    elif choices == 1:
        assert len(preferred.runner.cached_prefixes) == max(len(one.cached_prefixes) for one in fitting)
