"""Adapters in trials: what is declared and served, and that what must hold for them can fail."""

from dataclasses import replace

import pytest

from motet.api.v1 import common_pb2, scheduler_pb2
from motet_gateway.catalog import Catalog
from motet_simulator.trials.adapters import digest_of
from motet_simulator.trials.draw import draw_plan
from motet_simulator.trials.operator import TENANT
from motet_simulator.trials.plan import GATEWAYS, RUNNERS, AdapterChange, Fault, Plan
from motet_simulator.trials.run import run_trial
from motet_simulator.trials.served import ServedRevisions
from tests.simulator.defects import Defect, put_back


def change(number: int, content: int = 0, *, name: str = "a0", at: float = 0.0, **how: object) -> AdapterChange:
    return AdapterChange(name=name, number=number, content=content, at=at, **how)


def catalog(revision: int, **served: int | None) -> Catalog:
    """Serves adapters with these contents; None: nothing yet."""
    adapters = tuple(
        scheduler_pb2.CatalogAdapter(
            ref=common_pb2.AdapterRef(namespace=TENANT, name=name),
            digest="" if content is None else digest_of(content),
        )
        for name, content in served.items()
    )
    return Catalog(adapters=adapters, revision=(1, revision))


def plan_with(*changes: AdapterChange, seed: int = 1) -> Plan:
    """Its requests ask for the first of them."""
    drawn = draw_plan(seed)
    asks = tuple(replace(ask, adapter=changes[0].name) for ask in drawn.asks if len(ask.prompt) < 100)
    return replace(drawn, asks=asks, faults=(), changes=changes)


def test_what_a_gateway_serves_may_stay_get_newer_or_be_unknown_but_not_older():
    served = ServedRevisions({"a0": [change(0, 5), change(1, 6), change(2, 7)]})
    assert [served.problem_of(catalog(n, a0=content)) for n, content in enumerate((5, 5, None, 7, None))] == [""] * 5
    assert "after its change 2" in served.problem_of(catalog(6, a0=6))


def test_a_later_revision_may_have_the_bytes_of_an_earlier_one():
    served = ServedRevisions({"a0": [change(0, 5), change(1, 6), change(2, 5)]})
    assert [served.problem_of(catalog(n, a0=content)) for n, content in enumerate((5, 6, 5))] == [""] * 3
    assert served.problem_of(catalog(4, a0=6)) != ""


def test_what_was_deleted_does_not_come_back_until_it_is_made_again():
    history = [change(0, 5), change(1, deleted=True)]
    served = ServedRevisions({"a0": history})
    assert served.problem_of(catalog(1, a0=5)) == ""
    assert served.problem_of(catalog(2)) == ""
    assert served.problem_of(catalog(3, a0=5)) != ""
    history.append(change(2, 5))
    assert served.problem_of(catalog(4, a0=5)) == ""


def test_a_smaller_plan_may_lack_the_first_changes():
    served = ServedRevisions({"a0": [change(3, 5)]})
    assert [served.problem_of(catalog(n, a0=5)) for n in range(2)] == [""] * 2


def test_catalogs_come_in_their_order():
    served = ServedRevisions({})
    assert served.problem_of(catalog(2)) == ""
    assert served.problem_of(catalog(1)) == "serves catalog (1, 1) after (1, 2)"


def test_plans_have_adapters_of_every_kind():
    plans = [draw_plan(seed) for seed in range(50)]
    changes = [one for plan in plans for one in plan.changes]
    assert {one.min_replicas for one in changes} >= {0, 1, RUNNERS}
    assert {one.max_replicas for one in changes} == {1, RUNNERS}
    for wanted in ("deleted", "in_place"):
        assert {getattr(one, wanted) for one in changes} == {True, False}
    assert any(one.content >= AdapterChange.BROKEN for one in changes)
    assert any(one.number > 2 for one in changes)
    assert any(len({one.name for one in plan.changes}) > 3 for plan in plans)
    assert any(ask.adapter for plan in plans for ask in plan.asks)


def test_an_adapter_is_served_and_a_broken_revision_leaves_the_earlier_one():
    changes = change(0, 5), change(1, AdapterChange.BROKEN, at=4.0), change(2, 6, at=8.0)
    outcome = run_trial(plan_with(*changes))
    assert outcome.problem == ""
    assert outcome.answered > 20


@pytest.mark.parametrize(
    ("defect", "said"),
    [
        (
            Defect("", "motet_simulator.trials.adapters", "AdapterCache.read", "digest_of(folder.content)", '"other"'),
            "gets other tokens than an undisturbed run",
        ),
        (
            Defect(
                "",
                "motet_scheduler.policy.adapters.verdicts",
                "AdapterVerdicts.certified",
                "=event.digest,",
                "=Digest('x'),",
            ),
            "serves x of a0",
        ),
    ],
    ids=["an engine reads other bytes", "a revision has another digest"],
)
def test_other_bytes_than_those_of_a_revision_are_a_problem(defect: Defect, said: str):
    with put_back(defect):
        assert said in run_trial(plan_with(change(0, 5))).problem


def test_a_serving_digest_of_other_bytes_is_a_problem_before_any_gateway_serves_it():
    defect = Defect(
        "", "motet_scheduler.policy.adapters.verdicts", "AdapterVerdicts.certified", "=event.digest,", "=Digest('x'),"
    )
    no_gateways = tuple(Fault("kill", 0.1, f"gateway-{number}", seconds=100.0) for number in range(GATEWAYS))
    with put_back(defect):
        assert "a0: x was never at" in run_trial(replace(plan_with(change(0, 5)), faults=no_gateways)).problem
