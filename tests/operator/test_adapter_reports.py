"""What is known of adapters when the scheduler changes: nothing is taken back that still holds."""

from motet.domain import ObjectName
from motet_operator.adapter_reports import AdapterReports
from motet_operator.reconcile import AdapterReplica, AdapterReport
from tests.operator.builders import DIGEST, name

LEGAL, POET = name("legal"), name("poet")


def held_by(*runners: str) -> AdapterReport:
    places = tuple(AdapterReplica(runner=runner, tier="device", digest=DIGEST) for runner in runners)
    return AdapterReport(serving_digest=DIGEST, replicas=places)


def holders(knowledge: AdapterReports, adapter: ObjectName = LEGAL) -> list[str]:
    return [place.runner for place in knowledge.known[adapter].replicas]


def successor_of(*runners: str, exist: str = "abc") -> AdapterReports:
    """Of a scheduler that has said that these runners hold both adapters."""
    knowledge = AdapterReports()
    for adapter in (LEGAL, POET):
        knowledge.report(adapter, held_by(*runners))
    knowledge.stream_opened(list(exist))
    return knowledge


def test_runners_that_reconnect_one_by_one_keep_their_adapters() -> None:
    knowledge = successor_of("a", "b", "c")
    for runners in ("b", "bc", "abc"):
        knowledge.report(LEGAL, held_by(*runners))
        knowledge.runner_reported(runners[-1])
        assert holders(knowledge) == ["a", "b", "c"]


def test_a_runner_that_reconnects_without_an_adapter_no_longer_counts() -> None:
    knowledge = successor_of("a", "b")
    knowledge.report(LEGAL, held_by("a"))
    knowledge.runner_reported("a")
    assert holders(knowledge) == ["a", "b"]
    knowledge.runner_reported("b")
    assert holders(knowledge) == ["a"]
    knowledge.report(LEGAL, held_by())
    assert holders(knowledge) == []


def test_an_adapter_without_a_new_report_keeps_its_state() -> None:
    """A scheduler says nothing of one that no runner has checked yet, and says who is there before."""
    knowledge = successor_of("a")
    knowledge.runner_reported("a")
    assert holders(knowledge) == ["a"]
    knowledge.report(LEGAL, held_by())
    assert (holders(knowledge), holders(knowledge, POET)) == ([], ["a"])


def test_runners_that_have_gone_meanwhile_hold_nothing() -> None:
    knowledge = successor_of("a", "b", exist="a")
    knowledge.report(LEGAL, held_by())
    assert holders(knowledge) == ["a"]


def test_a_deleted_adapter_is_forgotten() -> None:
    knowledge = successor_of("a")
    knowledge.keep_only({POET})
    knowledge.runner_reported("a")
    assert knowledge.known.keys() == {POET}
