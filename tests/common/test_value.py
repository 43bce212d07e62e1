"""Values that are made often: equal ones are one, and none is shared by mistake."""

from dataclasses import field, replace

import pytest

from motet.value import value


@value(kw_only=True)
class Point:
    x: int
    names: list[str] = field(default_factory=list, hash=False)


def test_equal_values_are_one_key():
    assert Point(x=1) == Point(x=1) != Point(x=2)
    assert len({Point(x=1), Point(x=1), replace(Point(x=2), x=1)}) == 1


def test_a_value_has_no_other_fields():
    with pytest.raises(AttributeError):
        Point(x=1).z = 2
    with pytest.raises(TypeError):
        Point(1)


def test_values_share_no_default():
    Point(x=1).names.append("one")
    assert Point(x=1).names == []
