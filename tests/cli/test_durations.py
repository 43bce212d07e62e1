"""Lengths of time as people type them."""

from datetime import timedelta

import pytest

from motet_cli.durations import duration


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("0s", timedelta()),
        ("30s", timedelta(seconds=30)),
        ("30m", timedelta(minutes=30)),
        ("12h", timedelta(hours=12)),
        (" 90d ", timedelta(days=90)),
        ("36500d", timedelta(days=36_500)),
    ],
)
def test_a_number_and_a_unit(text: str, length: timedelta) -> None:
    assert duration(text) == length


@pytest.mark.parametrize("text", ["", "90", "d", "-1h", "1.5h", "1y", "1h30m", "٣d", "9" * 5000 + "d"])
def test_an_invalid_duration_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ValueError, match="a whole number with s, m, h or d, such as 30m, 12h or 90d"):
        duration(text)


@pytest.mark.parametrize("text", ["36501d", "999999999d"])
def test_a_too_long_duration_is_refused_with_the_maximum(text: str) -> None:
    with pytest.raises(ValueError, match="at most"):
        duration(text)
