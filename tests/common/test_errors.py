"""One tree and one table of errors: all services report an error in the same way, and the docs explain it."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pydantic import ValidationError

from motet import errors
from motet.api.v1 import common_pb2
from motet.errors import (
    TABLE,
    Internal,
    InvalidRequest,
    MotetError,
    ParameterUnavailable,
    UnsupportedParameter,
    from_proto,
    reason_of,
)
from motet.resources.status import Condition
from motet.runner_info import Failure
from testbed.tree import package_folders

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"


def every_error(root: type[MotetError] = MotetError) -> list[type[MotetError]]:
    return [root, *(found for child in root.__subclasses__() for found in every_error(child))]


OURS = [kind for kind in every_error() if kind.__module__ == errors.__name__]


def test_codes_are_unique() -> None:
    # The root stands for errors without a class of their own: their code is that of Internal.
    codes = [kind.mapping.code for kind in OURS if kind is not MotetError]
    assert len(codes) == len(set(codes))
    assert set(TABLE) == set(codes)


def test_the_table_finds_each_error_by_its_code() -> None:
    assert {code: kind.mapping.code for code, kind in TABLE.items()} == {code: code for code in TABLE}
    assert TABLE["internal_error"] is Internal


def test_each_error_is_made_somewhere() -> None:
    product = [path for folder in package_folders() if folder.name.startswith("motet") for path in folder.rglob("*.py")]
    text = "\n".join(path.read_text() for path in product)
    assert [kind.__name__ for kind in TABLE.values() if not re.search(rf"(?<!class ){kind.__name__}\b\(", text)] == []


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_way_to_a_peer(kind: type[MotetError]) -> None:
    error = kind("what is wrong; what to do", retry_after=1.5, reason="RankTooLarge")
    again = from_proto(common_pb2.Failure.FromString(error.to_proto().SerializeToString()))
    assert type(again) is (Internal if kind is MotetError else kind)
    assert (again.message, again.code, again.retry_after, again.reason) == (
        "what is wrong; what to do",
        kind.mapping.code,
        1.5,
        "RankTooLarge",
    )


def test_an_earlier_version_refuses_what_a_newer_one_places_elsewhere() -> None:
    error = ParameterUnavailable("temperature must be at most 2")
    for sent in (error.to_proto(), Failure.of(error).to_proto()):
        assert (sent.code, sent.reason) == ("unsupported_parameter", "ParameterUnavailable")
        assert type(from_proto(sent)) is ParameterUnavailable
        assert Failure.from_proto(sent) == Failure.of(error)
    sent = UnsupportedParameter("tools are not supported").to_proto()
    assert type(from_proto(sent)) is UnsupportedParameter


def test_an_error_that_is_raised_again_and_again_does_not_grow() -> None:
    kept = InvalidRequest("not like this", param="x", reason="Why")
    frames = set()
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="not like this") as raised:
            raise kept.again()
        assert (raised.value.param, raised.value.reason) == ("x", "Why")
        frames.add(len(raised.traceback))
    assert len(frames) == 1
    assert kept.__traceback__ is None


def test_an_error_without_a_hint_has_its_kinds_hint() -> None:
    for kind in OURS:
        assert kind("x").retry_after == kind.mapping.retry_after


def test_the_code_of_a_newer_peer_becomes_internal_with_its_sentence() -> None:
    error = from_proto(common_pb2.Failure(code="from_the_future", message="new trouble", retry_after_seconds=3))
    assert type(error) is Internal
    assert (error.message, error.retry_after) == ("new trouble", 3)


@pytest.mark.parametrize("reason", ["ShapeMismatch", "A", "A" * 128, "", "shape_mismatch", "A" * 129, "A\n", "Ä", "1A"])
def test_a_reason_that_no_condition_may_have_counts_as_none(reason: str) -> None:
    failure = common_pb2.Failure(code="adapter_incompatible", reason=reason)
    said = {reason_of(failure), from_proto(failure).reason, Failure.from_proto(failure).reason}
    try:
        Condition(type="Ready", status="False", reason=reason, message="", last_transition_time=datetime.now(UTC))
    except ValidationError:
        assert said == {""}
    else:
        assert said == {reason}


def test_a_retry_is_only_suggested_when_it_can_help() -> None:
    for kind in OURS:
        row = kind.mapping
        assert row.retry_after == 0 or row.http in (429, 503, 504), kind
        assert row.retry_after <= 60, "clients ignore longer hints"


def test_the_fault_of_a_caller_is_a_four_hundred() -> None:
    assert all(400 <= kind.mapping.http < 500 for kind in every_error(InvalidRequest))


def test_the_picture_of_the_tree_shows_every_error() -> None:
    assert errors.__doc__ is not None
    picture = re.findall(r"^[│├└─ ]*([A-Z]\w+)", errors.__doc__, re.MULTILINE)
    assert set(picture) >= {kind.__name__ for kind in OURS}


@pytest.mark.parametrize("code", sorted(TABLE))
def test_every_error_has_its_place_in_the_docs(code: str) -> None:
    assert re.search(rf"^## {code}$", REFERENCE.read_text(), re.MULTILINE)
