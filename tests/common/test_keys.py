"""API keys: how they are made, written and read, and how wrong ones are refused."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from motet import keys
from motet.keys import ApiKey, KeyScope

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def kept(written: keys.PresentedKey, **more: object) -> ApiKey:
    of = {"id": written.id, "tenant": "acme", "scopes": frozenset({KeyScope.USER}), "hash": written.hash}
    return ApiKey(**of, created=NOW, **more)  # type: ignore[arg-type]


def test_a_key_that_is_made_can_be_read_again() -> None:
    made = keys.new_key()
    assert keys.parse_key(str(made)) == made
    assert len(str(made)) == keys.MAX_KEY_LENGTH
    assert keys.matches(kept(made), made)


def test_keys_are_unique() -> None:
    assert len({str(keys.new_key()) for _ in range(100)}) == 100


def test_a_successors_id_is_derived_from_the_key_and_its_secret_is_random() -> None:
    one, other = keys.successor_key("0123456789abcdef"), keys.successor_key("0123456789abcdef")
    assert one.id == other.id != "0123456789abcdef"
    assert one.id != keys.successor_key(one.id).id
    assert one.secret != other.secret
    assert keys.parse_key(str(one)) == one


def test_the_stored_key_does_not_contain_the_secret() -> None:
    made = keys.new_key()
    assert made.secret.encode() not in made.hash
    assert len(made.hash) == 32


@pytest.mark.parametrize(
    "text",
    [
        "",
        "motet",
        "motet__",
        "sk-proj-something",
        f"motet_{'0' * 16}_{'a' * 42}",
        f"motet_{'0' * 16}_{'a' * 44}",
        f"motet_{'0' * 15}_{'a' * 43}",
        f"Motet_{'0' * 16}_{'a' * 43}",
        f"motet_{'0' * 16}_{'a' * 42}\n",
        f"motet_{'0' * 16}_{'ä' * 43}",
        "motet_" * 200_000,
    ],
)
def test_text_in_another_form_is_not_a_key(text: str) -> None:
    assert keys.parse_key(text) is None


def test_a_wrong_secret_and_an_unknown_id_open_nothing() -> None:
    made, other = keys.new_key(), keys.new_key()
    assert not keys.matches(kept(made), keys.PresentedKey(made.id, other.secret))
    assert not keys.matches(None, made)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, ""),
        ({"expires": NOW + timedelta(seconds=1)}, ""),
        ({"expires": NOW}, "expired"),
        ({"revoked": NOW}, "revoked"),
        ({"revoked": NOW + timedelta(hours=1)}, "revoked"),  # on a machine whose clock is ahead
        ({"revoked": NOW, "expires": NOW}, "revoked"),
    ],
)
def test_a_key_opens_until_it_expires_or_is_revoked(more: dict[str, datetime], why: str) -> None:
    assert kept(keys.new_key(), **more).refusal_reason(NOW) == why


@pytest.mark.parametrize("more", [{}, {"expires": NOW, "revoked": NOW + timedelta(hours=1)}])
def test_a_key_survives_writing_and_reading_a_file(more: dict[str, datetime]) -> None:
    key = kept(keys.new_key(), **more)
    assert keys.from_line(keys.to_line(key)) == key
    assert "\n" not in keys.to_line(key)


LINE = json.loads(keys.to_line(kept(keys.new_key())))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "JSON"),
        ("[]", "JSON"),
        (str(keys.new_key()), "JSON"),
        (json.dumps(LINE | {"id": "x"}), "'id'"),
        (json.dumps(LINE | {"tenant": "Acme Inc"}), "'tenant'"),
        (json.dumps(LINE | {"tenant": 7}), "'tenant'"),
        (json.dumps(LINE | {"hash": "00"}), "'hash'"),
        (json.dumps(LINE | {"scopes": "user"}), "'scopes'"),
        (json.dumps(LINE | {"created": None}), "'created'"),
        (json.dumps(LINE | {"created": "2026-05-01T00:00:00"}), "time zone"),
        (json.dumps(LINE | {"expires": "soon"}), "'expires'"),
        (json.dumps(LINE | {"expires": 5}), "'expires'"),
    ],
)
def test_an_invalid_line_gives_a_reason_without_its_content(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        keys.from_line(line)
    assert not line or line not in str(caught.value)


def test_an_unknown_scope_leaves_the_known_scopes() -> None:
    key = keys.from_line(json.dumps(LINE | {"scopes": ["user", "fly"]}))
    assert key.scopes == {KeyScope.USER}
