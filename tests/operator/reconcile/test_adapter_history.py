"""The last revisions in an adapter's status: which serve, and what became of the others."""

from dataclasses import replace
from typing import Any

import pytest

from motet.resources.status import MAX_REVISIONS, AdapterRevision
from motet_operator.reconcile import AdapterObject, AdapterReplica, AdapterReport, reconcile
from motet_operator.reconcile.adapter_history import revisions_of
from tests.operator.builders import NOW, adapter, later
from tests.operator.reconcile.test_adapters import only, world

SOURCE = "file:///adapters/legal"


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


class History:
    """An adapter, round after round: each begins with the status of the one before."""

    def __init__(self) -> None:
        self.adapter: AdapterObject = adapter()
        self.now = 0.0

    def after(self, **known: Any) -> tuple[AdapterRevision, ...]:
        """Of the generation that is declared, if `known` names no other one."""
        self.now += 10
        report = AdapterReport(**({"generation": self.adapter.generation} | known))
        place = replace(world(self.adapter, known={"legal": report}), now=later(self.now))
        self.adapter = replace(self.adapter, revisions=only(reconcile(place)).revisions)
        return self.adapter.revisions

    def wants(self, number: int, uri: str = SOURCE) -> None:
        changed = adapter(source={"uri": uri, "digest": digest(number)})
        before = self.adapter
        self.adapter = replace(changed, source=uri, generation=before.generation + 1, revisions=before.revisions)


def verdicts(revisions: tuple[AdapterRevision, ...]) -> list[tuple[str, str | None]]:
    return [(one.verdict, one.digest) for one in revisions]


def serving(number: int, *, source: str = SOURCE, **more: Any) -> dict[str, Any]:
    return {"serving_digest": digest(number), "source": source} | more


def test_a_revision_is_checked_serves_and_is_replaced() -> None:
    history = History()
    (first,) = history.after(checking=True)
    assert (first.source, first.digest, first.verdict, first.time) == (SOURCE, None, "Checking", later(10))
    assert history.after(checking=True) == (first,), "its check began when it began"
    (served,) = history.after(**serving(1))
    assert (served.digest, served.verdict, served.time) == (digest(1), "Serving", later(30))
    assert history.after(**serving(1)) == (served,)
    history.wants(2, "file:///adapters/newer")
    assert verdicts(history.after(**serving(1, checking=True))) == [("Checking", digest(2)), ("Serving", digest(1))]
    newer, before = history.after(**serving(2, source="file:///adapters/newer"))
    assert (newer.source, newer.verdict, newer.time) == ("file:///adapters/newer", "Serving", later(60))
    assert (before.source, before.verdict, before.time) == (SOURCE, "Replaced", served.time)


def test_both_are_there_while_requests_use_the_one_before() -> None:
    history = History()
    history.after(**serving(1))
    old = AdapterReplica(runner="r", tier="device", digest=digest(1))
    both = history.after(**serving(2, replicas=(old,)))
    assert verdicts(both) == [("Serving", digest(2)), ("Draining", digest(1))]
    assert verdicts(history.after(**serving(2))) == [("Serving", digest(2)), ("Replaced", digest(1))]


def test_a_refused_revision_says_why_and_the_one_that_serves_stays() -> None:
    history = History()
    history.after(**serving(1))
    history.wants(2)
    failed = serving(1, failure_code="adapter_incompatible", failure_reason="ShapeMismatch")
    refused, served = history.after(**failed)
    assert (refused.verdict, refused.reason, refused.digest) == ("Refused", "ShapeMismatch", digest(2))
    assert (served.verdict, served.digest) == ("Serving", digest(1))
    assert history.after(**failed) == (refused, served), "it is refused once"


@pytest.mark.parametrize("late", [{"failure_code": "adapter_incompatible"}, {"checking": True}])
def test_a_report_about_an_earlier_generation_says_nothing_about_the_newest_revision(late: dict[str, Any]) -> None:
    history = History()
    before = history.after(**serving(1))
    history.wants(2)
    assert history.after(**serving(1, generation=1), **late) == before


def test_a_revision_that_was_refused_and_serves_is_not_listed_as_refused() -> None:
    history = History()
    history.after(**serving(1))
    history.wants(1, "file:///adapters/moved")
    refused = serving(1, failure_code="adapter_fetch_failed")
    first = history.after(**refused)
    assert verdicts(first) == [("Refused", digest(1)), ("Serving", digest(1))]
    assert history.after(**refused) == first, "it is refused once"
    assert verdicts(history.after(**serving(1))) == [("Serving", digest(1))]


def test_what_has_served_and_is_refused_now_does_not_serve() -> None:
    """Its pool has another base model, or every runner refuses its proof."""
    history = History()
    history.wants(1)
    history.after(**serving(1))
    refused = {"failure_code": "adapter_incompatible", "failure_reason": "ShapeMismatch"}
    assert [one.verdict for one in history.after(**refused)] == ["Refused", "Replaced"]
    assert [one.verdict for one in history.after()] == ["Refused", "Replaced"], "a new operator has heard nothing"
    assert verdicts(history.after(**serving(1))) == [("Serving", digest(1))]


def test_bytes_that_serve_from_elsewhere_now_have_that_source() -> None:
    history = History()
    history.after(**serving(1))
    history.wants(1, "file:///adapters/moved")
    (moved,) = history.after(**serving(1, source="file:///adapters/moved", source_revision="v2"))
    assert (moved.source, moved.revision, moved.time) == ("file:///adapters/moved", "v2", later(10))


def test_a_failure_that_passes_is_no_verdict() -> None:
    passes = {"failure_code": "adapter_fetch_failed", "failure_reason": "NoSpace", "failure_passes": True}
    history = History()
    (begun,) = history.after(checking=True)
    (waits,) = history.after(**passes)
    assert (waits.verdict, waits.reason, waits.time) == ("Checking", "NoSpace", begun.time)
    assert history.after(checking=True) == (begun,), "it has passed"


def test_a_revision_that_serves_again_is_there_once() -> None:
    history = History()
    for number in (1, 2, 1):
        history.after(**serving(number))
    assert verdicts(history.adapter.revisions) == [("Serving", digest(1)), ("Replaced", digest(2))]


def test_five_are_kept_and_those_that_are_live_among_them() -> None:
    history = History()
    for number in range(9):
        history.after(**serving(number))
    assert verdicts(history.adapter.revisions)[-1] == ("Replaced", digest(4))
    for number in range(10, 20):
        history.wants(number)
        history.after(**serving(8, failure_code="adapter_incompatible"))
    assert len(history.adapter.revisions) == MAX_REVISIONS
    assert verdicts(history.adapter.revisions)[-2:] == [("Serving", digest(8)), ("Replaced", digest(7))], "to go back"


def test_a_new_operator_that_has_heard_nothing_leaves_them_as_they_were() -> None:
    history = History()
    before = history.after(**serving(1))
    assert history.after() == before


@pytest.mark.parametrize("status", [{}, {"revisions": None}, {"revisions": [{"verdict": "Sings"}, {}]}])
def test_what_another_version_has_written_is_ignored(status: dict[str, Any]) -> None:
    assert revisions_of(status) == ()


def test_what_was_written_is_read_again() -> None:
    one = AdapterRevision(source=SOURCE, digest=digest(1), verdict="Serving", time=NOW)
    assert revisions_of({"revisions": [one.model_dump(mode="json", by_alias=True), {"verdict": "Sings"}]}) == (one,)


def test_an_address_that_no_status_can_hold_changes_nothing() -> None:
    history = History()
    before = history.after(**serving(1))
    assert history.after(**serving(2, source="file:///" + "a" * 3000)) == before
