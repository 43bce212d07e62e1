"""Which API keys are valid, also while the store is down."""

import hmac
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from motet import keys
from motet.errors import NotAuthenticated, StoreUnavailable
from motet.keys import ApiKey, KeyScope
from motet_gateway.identity.caller import Caller
from motet_gateway.identity.keyring import Keyring

NOW = datetime(2026, 5, 1, tzinfo=UTC)
USER = frozenset({KeyScope.USER})


class KeyringSetup:
    """The key ring of a gateway that has just started."""

    def __init__(self) -> None:
        self.gone: list[dict[str, str]] = []
        """The answers, in order."""
        self.ring = Keyring(trusted_seconds=600, between_seconds=60, gone=lambda why: self.gone.append(dict(why)))
        self.keys: dict[str, ApiKey] = {}

    def make(self, tenant: str, **more: Any) -> keys.PresentedKey:
        made = keys.new_key()
        self.keys[made.id] = ApiKey(id=made.id, tenant=tenant, scopes=USER, hash=made.hash, created=NOW, **more)
        return made

    def read(self, after: float = 0.0) -> None:
        self.ring.replace(self.keys.values(), now=NOW + timedelta(seconds=after), at=after)

    def exist(self, **uids: str) -> None:
        """The operator says that these namespaces exist."""
        self.ring.namespaces_are(uids, now=NOW)

    def open(self, written: object, after: float = 0.0) -> Caller:
        return self.ring.open(str(written), now=NOW + timedelta(seconds=after), at=after)


@pytest.fixture
def ring() -> KeyringSetup:
    return KeyringSetup()


def test_a_key_is_accepted_for_its_tenant(ring: KeyringSetup) -> None:
    acme, zeta = ring.make("acme"), ring.make("zeta")
    ring.read()
    assert ring.open(acme) == Caller("acme", acme.id, USER)
    assert ring.open(zeta) == Caller("zeta", zeta.id, USER)


def test_only_the_owner_of_a_key_learns_what_is_wrong_with_it(ring: KeyringSetup) -> None:
    expired, revoked = ring.make("acme", expires=NOW), ring.make("acme", revoked=NOW)
    ring.read()
    for written, why in ((expired, "expired"), (revoked, "revoked")):
        with pytest.raises(NotAuthenticated, match=why):
            ring.open(written)
        with pytest.raises(NotAuthenticated, match="does not know this API key"):
            ring.open(keys.PresentedKey(written.id, keys.new_key().secret))
    with pytest.raises(NotAuthenticated, match="does not know this API key"):
        ring.open(keys.new_key())


def test_while_the_store_is_away_known_keys_are_valid_and_unknown_ones_are_not_called_wrong(ring: KeyringSetup) -> None:
    known = ring.make("acme", expires=NOW + timedelta(seconds=60))
    ring.read()
    ring.ring.not_read(NOW)
    assert ring.open(known, after=59).tenant == "acme"
    with pytest.raises(NotAuthenticated, match="expired"):
        ring.open(known, after=60)
    answers = set()
    for unknown in (keys.new_key(), keys.PresentedKey(known.id, keys.new_key().secret)):
        with pytest.raises(StoreUnavailable) as caught:
            ring.open(unknown)
        answers.add(caught.value.message)
    assert len(answers) == 1


def test_a_wrong_secret_and_an_unknown_id_take_as_long_and_have_the_same_error(
    ring: KeyringSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, revoked = ring.make("acme"), ring.make("zeta", revoked=NOW)
    ring.read()
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    answers = set()
    for id_ in (known.id, revoked.id, keys.new_key().id):
        with pytest.raises(NotAuthenticated) as caught:
            ring.open(keys.PresentedKey(id_, keys.new_key().secret))
        answers.add(caught.value.message)
    assert len(answers) == 1
    assert compared == [(32, 32)] * 3


def test_known_keys_are_trusted_for_a_bounded_time(ring: KeyringSetup) -> None:
    known = ring.make("acme")
    ring.read()
    ring.ring.not_read(NOW)
    assert ring.open(known, after=600)
    with pytest.raises(StoreUnavailable):
        ring.open(known, after=601)
    ring.read(after=700)
    assert ring.open(known, after=700)


def test_known_keys_expire_when_the_store_stays_away(ring: KeyringSetup) -> None:
    known = ring.make("acme")
    ring.read()
    assert ring.open(known, after=660)
    with pytest.raises(StoreUnavailable):
        ring.open(known, after=661)


def test_before_keys_were_read_all_requests_are_refused(ring: KeyringSetup) -> None:
    with pytest.raises(StoreUnavailable):
        ring.open(keys.new_key())
    with pytest.raises(StoreUnavailable):
        ring.open("anything")


def test_a_key_that_is_no_longer_valid_is_reported_once(ring: KeyringSetup) -> None:
    stays, revoked, forgotten = ring.make("acme"), ring.make("acme"), ring.make("zeta")
    expires = ring.make("acme", expires=NOW + timedelta(seconds=10))
    ring.read()
    ring.keys[revoked.id] = replace(ring.keys[revoked.id], revoked=NOW)
    del ring.keys[forgotten.id]
    ring.read(after=2)
    assert ring.gone == [{revoked.id: "revoked", forgotten.id: "revoked"}]
    ring.read(after=4)
    assert len(ring.gone) == 1
    ring.ring.unchanged(now=NOW + timedelta(seconds=12), at=12)
    assert ring.gone[1:] == [{expires.id: "expired"}]
    assert ring.open(stays, after=12)


def test_a_key_with_another_meaning_is_reported(ring: KeyringSetup) -> None:
    """As in a file, where a key may be replaced under the same id."""
    same, tenant, scopes, secret = (ring.make("acme") for _ in range(4))
    ring.read()
    for id_, change in (
        (tenant.id, {"tenant": "zeta"}),
        (scopes.id, {"scopes": frozenset({KeyScope.MONITOR})}),
        (secret.id, {"hash": keys.new_key().hash}),
        (same.id, {"expires": NOW + timedelta(days=1)}),
    ):
        ring.keys[id_] = replace(ring.keys[id_], **change)  # type: ignore[arg-type]
    ring.read(after=2)
    assert ring.gone == [dict.fromkeys((tenant.id, scopes.id, secret.id), "changed")]
    assert ring.open(tenant, after=2).tenant == "zeta"


def test_a_clock_that_jumps_forward_and_back_invalidates_no_key(ring: KeyringSetup) -> None:
    key = ring.make("acme", expires=NOW + timedelta(days=1))
    ring.read()
    ring.ring.unchanged(now=NOW + timedelta(days=2), at=2)
    assert ring.gone == [{key.id: "expired"}]
    ring.ring.unchanged(now=NOW, at=4)
    assert ring.open(key)
    assert ring.ring.refusal_reason(key.id, NOW) == ""
    ring.ring.unchanged(now=NOW + timedelta(days=1), at=6)
    assert ring.gone[1:] == [{key.id: "expired"}]


def test_new_limits_end_nothing_that_has_begun_and_count_for_what_comes(ring: KeyringSetup) -> None:
    """Its body may still be on the way, so that nobody counts it yet."""
    made = ring.make("acme")
    ring.read()
    begun = ring.open(made)
    ring.keys[made.id] = replace(ring.keys[made.id], limits=keys.KeyLimits(concurrency=1))
    ring.read(after=1)
    assert ring.ring.ended_reason(begun, NOW) == ""
    assert ring.open(made, after=1).limits == keys.KeyLimits(concurrency=1)
    ring.keys[made.id] = replace(ring.keys[made.id], hash=keys.new_key().hash)
    ring.read(after=2)
    assert ring.ring.ended_reason(begun, NOW) == "changed"


def test_changed_keys_are_read_and_the_others_stay(ring: KeyringSetup) -> None:
    stays, revoked, forgotten, moved, rotated = (ring.make("acme") for _ in range(5))
    expires = ring.make("acme", expires=NOW + timedelta(seconds=3))
    ring.read()
    before, new = dict(ring.keys), ring.make("zeta", expires=NOW + timedelta(seconds=5))
    changed = [
        ring.keys[new.id],
        replace(before[revoked.id], revoked=NOW),
        replace(before[moved.id], tenant="zeta"),
        replace(before[rotated.id], expires=NOW + timedelta(seconds=4)),
    ]
    ring.ring.change(changed, [forgotten.id], now=NOW + timedelta(seconds=2), at=2)
    assert ring.gone == [{revoked.id: "revoked", forgotten.id: "revoked", moved.id: "changed"}]
    assert [ring.open(one, after=2).tenant for one in (stays, moved, new, rotated, expires)] == [
        "acme",
        "zeta",
        "zeta",
        "acme",
        "acme",
    ]
    for one, why in ((revoked, "revoked"), (forgotten, "does not know this API key")):
        with pytest.raises(NotAuthenticated, match=why):
            ring.open(one, after=2)
    for after in (3, 4, 5):
        ring.ring.unchanged(now=NOW + timedelta(seconds=after), at=after)
    assert ring.gone[1:] == [{one.id: "expired"} for one in (expires, rotated, new)]
    assert ring.open(stays, after=600 + 5)


def test_a_change_while_the_clock_is_set_back_reports_removed_keys(ring: KeyringSetup) -> None:
    expired, forgotten = ring.make("acme", expires=NOW + timedelta(hours=1)), ring.make("acme")
    ring.read()
    ring.ring.unchanged(now=NOW + timedelta(hours=2), at=2)
    ring.ring.change([], [forgotten.id], now=NOW, at=4)
    assert ring.gone == [{expired.id: "expired"}, {forgotten.id: "revoked"}]
    ring.ring.unchanged(now=NOW + timedelta(hours=1), at=6)
    assert ring.gone[2:] == [{expired.id: "expired"}]


def test_keys_that_have_not_changed_are_not_looked_at_again(
    ring: KeyringSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be very many keys, and requests wait during the check."""
    made = [ring.make("acme", expires=NOW + timedelta(days=1 + number)) for number in range(1000)]
    ring.read()
    looked: list[str] = []
    why = ApiKey.refusal_reason

    def noted(self: ApiKey, now: datetime) -> str:
        looked.append(self.id)
        return why(self, now)

    monkeypatch.setattr(ApiKey, "refusal_reason", noted)
    ring.ring.unchanged(now=NOW, at=2)
    ring.ring.not_read(NOW)
    assert looked == []
    ring.ring.change([replace(ring.keys[made[7].id], revoked=NOW)], [], now=NOW + timedelta(days=1), at=4)
    assert set(looked) == {made[7].id, made[0].id}


def test_streams_of_a_key_end_once_its_meaning_changes(ring: KeyringSetup) -> None:
    """Also if keys are read often meanwhile."""
    made = {change: ring.make("acme") for change in ("nothing", "tenant", "hash", "expires", "revoked", "read anew")}
    ring.read()
    began = {change: ring.open(one) for change, one in made.items()}
    changes = {"tenant": "zeta", "hash": keys.new_key().hash, "expires": NOW + timedelta(seconds=9), "revoked": NOW}
    for change, value in changes.items():
        ring.keys[made[change].id] = replace(ring.keys[made[change].id], **{change: value})
    ring.ring.change([ring.keys[made["read anew"].id]], [], now=NOW, at=1)
    for _ in range(2):
        ring.read(after=2)
    answers = {change: ring.ring.ended_reason(caller, NOW) for change, caller in began.items()}
    assert {change: why for change, why in answers.items() if why} == {
        "tenant": "changed",
        "hash": "changed",
        "revoked": "revoked",
    }


def test_the_reason_why_a_key_is_invalid_is_always_the_same(ring: KeyringSetup) -> None:
    expired, revoked = ring.make("acme", expires=NOW), ring.make("acme", revoked=NOW)
    ring.read()
    answers = {id_: ring.ring.refusal_reason(id_, NOW) for id_ in (expired.id, revoked.id, "nobody's")}
    assert answers == {expired.id: "expired", revoked.id: "revoked", "nobody's": "revoked"}


# ------------------------------------------------------------------------------------------------- bound to a namespace

OLD_UID, NEW_UID = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"


def test_a_bound_key_does_not_serve_the_next_namespace_of_that_name(ring: KeyringSetup) -> None:
    bound, unbound, other = (
        ring.make("acme", tenant_uid=OLD_UID),
        ring.make("acme"),
        ring.make("zeta", tenant_uid=NEW_UID),
    )
    ring.exist(acme=OLD_UID, zeta=NEW_UID)
    ring.read()
    caller = ring.open(bound)
    assert caller == Caller("acme", bound.id, USER)
    for now_there in ({"zeta": NEW_UID}, {"acme": NEW_UID, "zeta": NEW_UID}):  # deleted, then made again
        ring.exist(**now_there)
        answers = set()
        for unknown in (bound, keys.PresentedKey(bound.id, keys.new_key().secret), keys.new_key()):
            with pytest.raises(NotAuthenticated) as caught:
                ring.open(unknown)
            answers.add(caught.value.message)
        assert len(answers) == 1, "the key counts as unknown"
        assert ring.ring.ended_reason(caller, NOW) == "deleted with its namespace"
        assert (ring.open(unbound).tenant, ring.open(other).tenant) == ("acme", "zeta")
    assert ring.gone == [{bound.id: "deleted with its namespace"}], "once, and no other key"


def test_a_bound_key_that_was_refused_is_watched_again_once_its_namespace_is_there(ring: KeyringSetup) -> None:
    bound = ring.make("acme", tenant_uid=OLD_UID)
    ring.exist(zeta=NEW_UID)
    ring.read()
    ring.exist(acme=OLD_UID)
    ring.open(bound)
    ring.exist(zeta=NEW_UID)
    assert ring.gone == [{bound.id: "deleted with its namespace"}]


def test_a_bound_key_is_not_called_wrong_before_the_gateway_knows_namespaces(ring: KeyringSetup) -> None:
    bound, unbound = ring.make("acme", tenant_uid=OLD_UID), ring.make("acme")
    ring.read()
    with pytest.raises(StoreUnavailable, match="which namespaces exist"):
        ring.open(bound)
    with pytest.raises(NotAuthenticated, match="does not know this API key"):
        ring.open(keys.PresentedKey(bound.id, keys.new_key().secret))
    assert ring.open(unbound).tenant == "acme"


def test_a_key_that_is_bound_later_ends_as_a_changed_one(ring: KeyringSetup) -> None:
    key = ring.make("acme")
    ring.exist(acme=OLD_UID)
    ring.read()
    caller = ring.open(key)
    ring.keys[key.id] = replace(ring.keys[key.id], tenant_uid=OLD_UID)
    ring.read(after=1)
    assert ring.gone == [{key.id: "changed"}]
    assert ring.open(key, after=1) is not caller
