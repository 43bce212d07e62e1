"""`motet key`: keys are made, listed and ended; what is printed opens a gateway, and is nowhere else."""

import asyncio
import io
import json
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, text

from motet import keys
from motet.clock import monotonic
from motet.errors import NotAuthenticated, SetupError
from motet.keys import ApiKey, KeyScope
from motet.store import keys as kept
from motet.store import migrate, open_store
from motet_cli import main as command
from motet_cli.key_commands import HOW_TO_HASH, KEY_ONE_LINER, successor
from motet_gateway.identity.access import KeyAccess
from motet_gateway.identity.caller import Caller
from motet_gateway.identity.key_sources import NoKeys
from motet_gateway.identity.keyring import Keyring
from motet_gateway.settings import Settings as GatewaySettings
from tests.support.forked_motet import motet as in_a_process
from tests.support.key_rows import record_read_key_ids
from tests.support.older_schema import take_back_at
from tests.support.postgresql import PostgreSQL

NOBODYS = "0123456789abcdef"


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str

    @property
    def key(self) -> str:
        """What was printed, without the end of its line."""
        assert self.status == 0, self.stderr
        return self.stdout.removesuffix("\n")


Motet = Callable[..., Done]


@pytest.fixture
def motet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Motet]:
    """The command in this process, with a state directory that does not exist yet."""
    for name in [name for name in os.environ if name.startswith("MOTET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MOTET_DATA_DIR", str(tmp_path / "state"))
    # In a process of its own the file stays open until the end.
    monkeypatch.setattr("motet_cli.database.log_to", lambda _: None)
    before = os.umask(0o022)

    def run(*arguments: str, stdin: str | None = None) -> Done:
        monkeypatch.setattr(sys, "argv", ["motet", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((stdin or "").encode())))
        with pytest.raises(SystemExit) as ended:
            command.main()
        said = capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Done(code or 0, said.out, said.err)

    yield run
    os.umask(before)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, motet: Motet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the database that the command uses."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/state/motet.db"
    server: PostgreSQL = request.getfixturevalue("postgresql")
    url = asyncio.run(server.new_database())
    monkeypatch.setenv("MOTET_DATABASE_URL", url)
    return url


def stored(url: str) -> list[ApiKey]:
    async def read() -> list[ApiKey]:
        async with open_store(url) as store:
            return [key for key, _ in await kept.all_keys(store)]

    return asyncio.run(read())


def opens(known: list[ApiKey], key: str, *, after: timedelta = timedelta()) -> Caller:
    """Whom a gateway that has read these takes the key's owner for."""
    ring, now = Keyring(trusted_seconds=600, between_seconds=0, gone=lambda _: None), datetime.now(UTC) + after
    ring.replace(known, now=now, at=0)
    return ring.open(key, now=now, at=0)


def listed(motet: Motet) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(motet("key", "ls", "--json").stdout)["keys"]
    return found


def id_of(key: str) -> str:
    return key.split("_")[1]


def test_a_created_key_is_accepted_by_a_gateway_with_the_database(motet: Motet, url: str) -> None:
    acme = motet("key", "create", "--tenant", "acme").key
    zeta = motet("key", "create", "--tenant", "zeta", "--scopes", "admin, user").key
    assert opens(stored(url), acme) == Caller("acme", id_of(acme), frozenset({KeyScope.USER}))
    assert opens(stored(url), zeta).scopes == {KeyScope.USER, KeyScope.ADMIN}
    with pytest.raises(NotAuthenticated):
        opens(stored(url), f"motet_{id_of(acme)}_{zeta.split('_', 2)[2]}")


def test_stdout_has_only_the_key_and_stderr_never_its_secret(motet: Motet) -> None:
    done = motet("key", "create", "--tenant", "acme", "--scopes", "user,monitor")
    made = keys.parse_key(done.key)
    assert made is not None
    assert (
        f"Key {made.id}: tenant acme, scopes monitor, user, does not expire. The key is shown only once" in done.stderr
    )
    assert made.secret not in done.stderr


def test_the_first_key_says_what_it_changes_and_the_second_does_not(motet: Motet) -> None:
    said = "From now on gateways require a key from every client, also on this machine"
    assert said in motet("key", "create", "--tenant", "acme").stderr
    assert said not in motet("key", "create", "--tenant", "acme").stderr


def test_the_database_holds_no_secret_and_is_its_owners_alone(motet: Motet, tmp_path: Path) -> None:
    made = keys.parse_key(motet("key", "create", "--tenant", "acme").key)
    assert made is not None
    folder = tmp_path / "state"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert (folder / "motet.db") in files
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        assert made.secret.encode() not in file.read_bytes()


def test_a_key_expires_at_the_given_time(motet: Motet, url: str) -> None:
    key = motet("key", "create", "--tenant", "acme", "--expires", "90d").key
    assert opens(stored(url), key, after=timedelta(days=89))
    with pytest.raises(NotAuthenticated, match="expired"):
        opens(stored(url), key, after=timedelta(days=90))


def test_ls_shows_each_key_with_its_state_and_no_hash(motet: Motet, url: str) -> None:
    active = motet("key", "create", "--tenant", "acme", "--expires", "12h").key
    revoked = motet("key", "create", "--tenant", "zeta", "--scopes", "monitor").key
    motet("key", "revoke", id_of(revoked))
    old = motet("key", "create", "--tenant", "omega").key
    new = motet("key", "rotate", id_of(old)).key

    done = motet("key", "ls", "--json")
    found = {one["id"]: one for one in json.loads(done.stdout)["keys"]}
    states = {id_of(active): "active", id_of(revoked): "revoked", id_of(old): "active", id_of(new): "active"}
    assert {id_: one["state"] for id_, one in found.items()} == states
    one = found[id_of(active)]
    assert set(one) == {
        "id",
        "tenant",
        "namespace_uid",
        "limits",
        "scopes",
        "created",
        "expires",
        "revoked",
        "last_used",
        "state",
    }
    assert (one["tenant"], one["scopes"], one["revoked"], one["last_used"]) == ("acme", ["user"], None, None)
    lasts = datetime.fromisoformat(one["expires"]) - datetime.fromisoformat(one["created"])
    assert lasts == timedelta(hours=12)

    table = motet("key", "ls").stdout
    assert len(table.splitlines()) == 5
    ends = datetime.fromisoformat(found[id_of(old)]["expires"])
    line = next(line for line in table.splitlines() if line.startswith(id_of(old)))
    assert f"{ends:%Y-%m-%d %H:%M} UTC" in line, "an hour from now"
    for key in stored(url):
        assert key.hash.hex() not in done.stdout + table
    for key in (active, revoked, old, new):
        assert key.split("_", 2)[2] not in done.stdout + table


def test_ls_shows_limits_if_a_key_has_some(motet: Motet) -> None:
    free = motet("key", "create", "--tenant", "acme").key
    assert "limits" not in motet("key", "ls").stdout
    bound = motet("key", "create", "--tenant", "acme", "--requests-per-minute", "60", "--concurrency", "8").key
    head, *lines = motet("key", "ls").stdout.splitlines()
    assert "scopes   limits " in head
    by_id = {line.split()[0]: line for line in lines}
    assert " 60 requests/min, 8 at once " in by_id[id_of(bound)]
    assert "user     -  " in by_id[id_of(free)]


def test_ls_says_when_a_key_was_last_used(motet: Motet, url: str) -> None:
    key = motet("key", "create", "--tenant", "acme").key
    at = datetime(2026, 5, 1, 13, 37, tzinfo=UTC)

    async def use() -> None:
        async with open_store(url) as store:
            await kept.note_use(store, [id_of(key)], at=at)

    asyncio.run(use())
    assert listed(motet)[0]["last_used"] == "2026-05-01T13:00:00+00:00"
    assert "2026-05-01 13:00 UTC" in motet("key", "ls").stdout


def test_an_expired_key_is_listed_as_expired(motet: Motet, url: str) -> None:
    now = datetime.now(UTC)
    motet("key", "create", "--tenant", "acme")  # makes the database
    expired = ApiKey(
        id=NOBODYS, tenant="acme", scopes=frozenset(), hash=b"", created=now - timedelta(2), expires=now - timedelta(1)
    )

    async def add() -> None:
        async with open_store(url) as store:
            await kept.add(store, expired)

    asyncio.run(add())
    assert {one["id"]: one["state"] for one in listed(motet)}[NOBODYS] == "expired"


def test_without_a_database_there_are_no_keys_and_none_is_made(motet: Motet, tmp_path: Path) -> None:
    assert listed(motet) == []
    done = motet("key", "ls")
    assert (done.status, done.stdout) == (0, "")
    assert "There are no keys. Make one: motet key create --tenant NAMESPACE" in done.stderr
    assert motet("key", "revoke", NOBODYS).status == 1
    assert not (tmp_path / "state").exists()


def versions(database: Path) -> list[tuple[str]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT version_num FROM schema_version").fetchall()


def test_only_create_brings_a_database_of_an_older_version_up_to_date(motet: Motet, tmp_path: Path) -> None:
    database = tmp_path / "state" / "motet.db"
    asyncio.run(migrate(f"sqlite+aiosqlite:///{database}"))
    newest = versions(database)
    asyncio.run(take_back_at(f"sqlite+aiosqlite:///{database}", "0002"))
    assert listed(motet) == []
    for verb in ("revoke", "rotate"):
        done = motet("key", verb, NOBODYS)
        assert (done.status, done.stdout) == (1, "")
        assert f"there is no key {NOBODYS} in this database" in done.stderr
    assert versions(database) == [("0002",)]
    key = motet("key", "create", "--tenant", "acme").key
    assert versions(database) == newest
    assert [one["id"] for one in listed(motet)] == [id_of(key)]


def test_local_gateways_know_that_keys_exist_when_the_database_is_lost(motet: Motet, tmp_path: Path) -> None:
    """None of them ran when it was made."""
    state = tmp_path / "state"
    motet("key", "create", "--tenant", "acme")
    (state / "motet.db").unlink()

    async def asks() -> bool:
        access = KeyAccess(
            GatewaySettings(),
            NoKeys(),
            gone=lambda _: None,
            clock=monotonic,
            today=lambda: datetime.now(UTC),
            memory=state / keys.KEYS_MADE_FILE,
        )
        await access.begin()
        return access.needs_key()

    assert asyncio.run(asks())
    (state / keys.KEYS_MADE_FILE).unlink()
    assert not asyncio.run(asks())


def test_a_key_in_a_database_server_does_not_concern_local_gateways(
    motet: Motet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgresql: PostgreSQL
) -> None:
    monkeypatch.setenv("MOTET_DATABASE_URL", asyncio.run(postgresql.new_database()))
    assert motet("key", "create", "--tenant", "acme").key
    assert not (tmp_path / "state" / keys.KEYS_MADE_FILE).exists()


def test_ls_writes_nothing(motet: Motet, monkeypatch: pytest.MonkeyPatch, postgresql: PostgreSQL) -> None:
    url = asyncio.run(postgresql.new_database())
    monkeypatch.setenv("MOTET_DATABASE_URL", url)
    key = motet("key", "create", "--tenant", "acme").key

    async def close_for_writers() -> None:
        async with open_store(url) as store, store.write() as connection:
            name = make_url(url).database
            await connection.execute(text("UPDATE schema_version SET version_num = '0002'"))
            await connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))

    asyncio.run(close_for_writers())
    assert [one["id"] for one in listed(motet)] == [id_of(key)]
    done = motet("key", "revoke", id_of(key))
    assert done.status == 1
    assert "read-only transaction" in done.stderr


def test_a_revoked_key_opens_nothing_and_the_other_still_does(motet: Motet, url: str) -> None:
    revoked, stays = (motet("key", "create", "--tenant", "acme").key for _ in range(2))
    done = motet("key", "revoke", id_of(revoked))
    assert (done.status, done.stdout) == (0, "")
    assert f"Key {id_of(revoked)} of tenant acme is revoked" in done.stderr
    for after in (timedelta(), timedelta(days=-1)):  # also where the clock is a day behind
        with pytest.raises(NotAuthenticated, match="revoked"):
            opens(stored(url), revoked, after=after)
    assert opens(stored(url), stays).tenant == "acme"


def test_revoking_twice_is_no_error_and_keeps_the_first_time(motet: Motet, url: str) -> None:
    key = motet("key", "create", "--tenant", "acme").key
    motet("key", "revoke", id_of(key))
    first = stored(url)
    done = motet("key", "revoke", id_of(key))
    assert done.status == 0
    assert "was already revoked at" in done.stderr
    assert stored(url) == first


@pytest.mark.parametrize("verb", ["revoke", "rotate"])
def test_an_unknown_id_is_an_error(motet: Motet, url: str, verb: str) -> None:
    motet("key", "create", "--tenant", "acme")
    done = motet("key", verb, NOBODYS)
    assert (done.status, done.stdout) == (1, "")
    assert f"there is no key {NOBODYS} in this database. `motet key ls` lists all keys." in done.stderr
    assert len(stored(url)) == 1


def test_rotate_makes_a_second_key_and_the_old_one_ends_after_the_overlap(motet: Motet, url: str) -> None:
    old = motet("key", "create", "--tenant", "acme", "--scopes", "user,admin").key
    done = motet("key", "rotate", id_of(old), "--overlap", "30m")
    new = done.key
    assert new != old
    assert f"The old key {id_of(old)} expires at " in done.stderr
    for key in (old, new):
        caller = opens(stored(url), key, after=timedelta(minutes=29))
        assert (caller.tenant, caller.scopes) == ("acme", {KeyScope.USER, KeyScope.ADMIN})
    with pytest.raises(NotAuthenticated, match="expired"):
        opens(stored(url), old, after=timedelta(minutes=30))
    assert opens(stored(url), new, after=timedelta(days=1000))


def test_rotate_leaves_the_old_key_an_hour_unless_told_otherwise(motet: Motet, url: str) -> None:
    old = motet("key", "create", "--tenant", "acme").key
    motet("key", "rotate", id_of(old))
    assert opens(stored(url), old, after=timedelta(minutes=59))
    with pytest.raises(NotAuthenticated):
        opens(stored(url), old, after=timedelta(minutes=60))


def test_without_overlap_the_old_key_ends_now(motet: Motet, url: str) -> None:
    old = motet("key", "create", "--tenant", "acme").key
    done = motet("key", "rotate", id_of(old), "--overlap", "0s")
    assert f"The old key {id_of(old)} is revoked." in done.stderr
    with pytest.raises(NotAuthenticated, match="revoked"):
        opens(stored(url), old, after=timedelta(days=-1))


def test_the_successor_of_a_key_that_expires_lasts_as_long(motet: Motet, url: str) -> None:
    old = motet("key", "create", "--tenant", "acme", "--expires", "10d").key
    new = motet("key", "rotate", id_of(old)).key
    known = {key.id: key for key in stored(url)}
    assert known[id_of(new)].expires == known[id_of(new)].created + timedelta(days=10)


@pytest.mark.parametrize("expires", [[], ["--expires", "10d"]])
def test_a_rotated_key_is_not_rotated_again_but_its_successor_is(motet: Motet, url: str, expires: list[str]) -> None:
    old = motet("key", "create", "--tenant", "acme", *expires).key
    new = motet("key", "rotate", id_of(old)).key
    before = stored(url)
    done = motet("key", "rotate", id_of(old), "--overlap", "0s")
    assert (done.status, done.stdout) == (2, "")
    said = f"key {id_of(old)} was already replaced by {id_of(new)}. Rotate {id_of(new)}: motet key rotate {id_of(new)}"
    assert said in done.stderr
    assert stored(url) == before
    newest = motet("key", "rotate", id_of(new)).key
    lasts = {key.id: key.expires and key.expires - key.created for key in stored(url)}
    assert lasts[id_of(newest)] == (timedelta(days=10) if expires else None)
    assert f"replaced by {id_of(newest)}" in motet("key", "rotate", id_of(new)).stderr


def test_a_key_whose_successor_was_revoked_is_not_rotated_again(motet: Motet, url: str) -> None:
    """It may open for long, but not for longer than was said when it was rotated."""
    old = motet("key", "create", "--tenant", "acme").key
    new = motet("key", "rotate", id_of(old)).key
    motet("key", "revoke", id_of(new))
    done = motet("key", "rotate", id_of(old))
    assert (done.status, done.stdout) == (2, "")
    assert f"replaced by {id_of(new)}, which is revoked. Make a new one: motet key create --tenant acme" in done.stderr
    assert len(stored(url)) == 2


def test_concurrent_rotations_make_one_successor(motet: Motet, url: str) -> None:
    old = motet("key", "create", "--tenant", "acme", "--expires", "10d").key
    (seen,) = stored(url)
    now = datetime.now(UTC)

    async def rotate() -> None:
        async with open_store(url) as store:
            new = successor(seen, keys.successor_key(seen.id), now=now)
            await kept.rotate(store, seen, new, at=now + timedelta(hours=1))

    async def both() -> list[BaseException | None]:
        return await asyncio.gather(rotate(), rotate(), return_exceptions=True)

    done = asyncio.run(both())
    assert sorted(type(one).__name__ for one in done) == ["NoneType", "SetupError"]
    lasts = [key.expires and key.expires - key.created for key in stored(url) if key.id != id_of(old)]
    assert lasts == [timedelta(days=10)]


def test_a_key_in_its_overlap_can_be_revoked_at_once(motet: Motet, url: str) -> None:
    old = motet("key", "create", "--tenant", "acme").key
    motet("key", "rotate", id_of(old))
    assert "is revoked" in motet("key", "revoke", id_of(old)).stderr
    with pytest.raises(NotAuthenticated):
        opens(stored(url), old)


def test_an_invalid_key_cannot_be_rotated(motet: Motet, url: str) -> None:
    old = motet("key", "create", "--tenant", "acme").key
    motet("key", "revoke", id_of(old))
    done = motet("key", "rotate", id_of(old))
    assert (done.status, done.stdout) == (2, "")
    assert "is revoked and cannot be rotated. Make a new one: motet key create --tenant acme" in done.stderr
    assert len(stored(url)) == 1


def test_a_key_revoked_during_a_rotation_gets_no_successor(motet: Motet, url: str) -> None:
    old = motet("key", "create", "--tenant", "acme").key
    (seen,) = stored(url)
    motet("key", "revoke", id_of(old))
    revoked = stored(url)
    new = replace(seen, id=NOBODYS, created=datetime.now(UTC))

    async def succeed() -> None:
        async with open_store(url) as store:
            await kept.rotate(store, seen, new, at=new.created + timedelta(hours=1))

    with pytest.raises(SetupError, match=f"key {id_of(old)} is revoked and cannot be rotated"):
        asyncio.run(succeed())
    assert stored(url) == revoked


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tenant", "Acme_Corp"], "--tenant 'Acme_Corp' is not a valid tenant"),
        (["--tenant", "Acme_Corp"], "Perhaps --tenant acme-corp?"),
        (["--tenant", ""], "--tenant '' is not a valid tenant"),
        (["--tenant", "a" * 64], "at most 63 lower-case letters, digits and '-'"),
        (["--tenant", "acme/legal"], "--tenant 'acme/legal' is not a valid tenant"),
        (["--tenant", "acme\n"], "--tenant 'acme\\n' is not a valid tenant"),
        (
            ["--tenant", "acme", "--scopes", "user,root"],
            "--scopes: unknown scope 'root'. Choose from user, admin, monitor",
        ),
        (["--tenant", "acme", "--scopes", ""], "--scopes: unknown scope ''. Choose from user, admin, monitor"),
        (["--tenant", "acme", "--expires", "soon"], "--expires 'soon' is not a duration"),
        (["--tenant", "acme", "--expires", "0d"], "--expires '0d' is too short."),
        (["--tenant", "acme", "--expires", "99999d"], "--expires '99999d' is too long: at most 36500d."),
    ],
)
@pytest.mark.parametrize("verb", ["create", "hash"])
def test_a_wrong_option_is_named_with_what_to_write(
    motet: Motet, tmp_path: Path, verb: str, options: list[str], said: str
) -> None:
    done = motet("key", verb, *options, stdin=str(keys.new_key()))
    assert (done.status, done.stdout) == (2, "")
    assert said in done.stderr
    assert not (tmp_path / "state").exists()


def test_create_needs_a_tenant(motet: Motet) -> None:
    done = motet("key", "create")
    assert done.status == 2
    assert "--tenant" in done.stderr


def test_a_wrong_overlap_changes_nothing(motet: Motet, url: str) -> None:
    old = motet("key", "create", "--tenant", "acme").key
    done = motet("key", "rotate", id_of(old), "--overlap", "-1h")
    assert done.status == 2
    assert "--overlap '-1h' is not a duration" in done.stderr
    assert [key.revoked for key in stored(url)] == [None]


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (["create", "--tenant", "acme"], HOW_TO_HASH),
        (["rotate", NOBODYS], HOW_TO_HASH),
        (["revoke", NOBODYS], "To revoke a key, remove its line there."),
    ],
)
def test_with_keys_in_a_file_the_database_is_not_written(
    motet: Motet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], instead: str
) -> None:
    monkeypatch.setenv("MOTET_GATEWAY_KEYS_FILE", "/etc/motet/keys")
    done = motet("key", *arguments)
    assert (done.status, done.stdout) == (2, "")
    assert "gateways read keys from /etc/motet/keys (MOTET_GATEWAY_KEYS_FILE), not from the database" in done.stderr
    assert "`gateway.keysSecret`" in done.stderr
    assert instead in done.stderr
    assert not (tmp_path / "state").exists()
    monkeypatch.setenv("MOTET_GATEWAY_KEYS_FILE", "")
    assert "MOTET_GATEWAY_KEYS_FILE" not in motet("key", *arguments).stderr


@pytest.mark.parametrize("verb", ["revoke", "rotate"])
def test_a_whole_key_where_an_id_belongs_is_not_repeated(motet: Motet, verb: str) -> None:
    made = keys.new_key()
    done = motet("key", verb, str(made))
    assert done.status == 2
    assert f"the id is enough. Run: motet key {verb} {made.id}" in done.stderr
    done = motet("key", verb, str(made)[:-1])
    assert done.status == 2
    assert "ID must be the 16 characters (0-9 and a-f)" in done.stderr
    assert made.secret[:-1] not in done.stderr


def test_a_hashed_key_is_accepted_by_a_gateway_with_a_key_file(motet: Motet, tmp_path: Path) -> None:
    made = keys.new_key()
    done = motet(
        "key", "hash", "--tenant", "acme", "--scopes", "user,monitor", "--expires", "30m", stdin=f"  {made}\n\n"
    )
    (line,) = done.stdout.splitlines()
    key = keys.from_line(line)
    scopes = frozenset({KeyScope.USER, KeyScope.MONITOR})
    assert opens([key], str(made)) == Caller("acme", made.id, scopes)
    with pytest.raises(NotAuthenticated, match="expired"):
        opens([key], str(made), after=timedelta(minutes=30))
    assert made.secret not in done.stdout + done.stderr
    assert not (tmp_path / "state").exists(), "no database is needed"


@pytest.mark.parametrize(
    "given", ["", "\n", "sk-proj-of-somebody-else", f"motet_{NOBODYS}_short", "ä" * 10, "x" * 10_000]
)
def test_hash_refuses_other_text_without_repeating_it(motet: Motet, given: str) -> None:
    done = motet("key", "hash", "--tenant", "acme", stdin=given)
    assert (done.status, done.stdout) == (2, "")
    assert ("is not a key" if given.strip() else "is empty") in done.stderr
    assert HOW_TO_HASH in done.stderr
    assert not given.strip() or given.strip() not in done.stderr


def test_creating_or_ending_one_key_does_not_read_all(motet: Motet, monkeypatch: pytest.MonkeyPatch) -> None:
    read_key_ids = record_read_key_ids(monkeypatch)
    """There may be very many."""
    made = [id_of(motet("key", "create", "--tenant", "acme").key) for _ in range(3)]
    assert read_key_ids == []
    for verb in ("rotate", "revoke"):
        assert motet("key", verb, made[0]).status == 0
        assert set(read_key_ids) == {made[0]}


def test_hash_refuses_two_keys(motet: Motet) -> None:
    assert motet("key", "hash", "--tenant", "acme", stdin=f"{keys.new_key()}\n{keys.new_key()}\n").status == 2


def test_a_key_as_an_argument_is_refused_and_not_repeated(motet: Motet) -> None:
    made = keys.new_key()
    done = motet("key", "hash", "--tenant", "acme", str(made), stdin=str(made))
    assert (done.status, done.stdout) == (2, "")
    assert "do not give the key as an argument" in done.stderr
    assert made.secret not in done.stderr


def test_hash_on_a_terminal_says_what_to_pipe() -> None:
    main, terminal = os.openpty()
    with closing(os.fdopen(main)), closing(os.fdopen(terminal)) as stdin:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "motet_cli.main", "key", "hash", "--tenant", "acme"],
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert "standard input is a terminal" in done.stderr
    assert HOW_TO_HASH in done.stderr


def test_the_one_liner_for_a_key_without_a_database_works() -> None:
    said = subprocess.run(["sh", "-c", KEY_ONE_LINER], capture_output=True, text=True, check=True).stdout
    assert keys.parse_key(said.strip()) is not None


@pytest.mark.parametrize("verb", ["create", "ls"])
def test_a_file_that_is_no_database_is_named_without_a_traceback(tmp_path: Path, verb: str) -> None:
    (tmp_path / "motet.db").write_text("this is a text, and no database" * 100)
    more = ["--tenant", "acme"] if verb == "create" else []
    done = in_a_process("key", verb, "--data-dir", str(tmp_path), *more)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path}/motet.db is not a database. Move the file away" in done.stderr


def test_an_unreachable_server_is_named_without_its_password(motet: Motet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTET_DATABASE_URL", "postgresql+asyncpg://motet:hunter2@127.0.0.1:1/motet")
    done = motet("key", "create", "--tenant", "acme")
    assert (done.status, done.stdout) == (2, "")
    assert "127.0.0.1:1/motet" in done.stderr
    assert "hunter2" not in done.stderr


def test_help_names_every_command() -> None:
    said = in_a_process("key").stdout
    assert all(verb in said for verb in ("create", "ls", "revoke", "rotate", "hash"))


# ------------------------------------------------------------------------------------------------------------- limits

LIMITS = ("--requests-per-minute", "60", "--tokens-per-minute", "9000", "--concurrency", "4")


def test_a_key_has_limits_and_so_has_its_successor(motet: Motet, url: str) -> None:
    done = motet("key", "create", "--tenant", "acme", *LIMITS)
    assert "requests per minute 60, tokens per minute 9000, concurrency 4" in done.stderr
    motet("key", "rotate", id_of(done.key))
    assert {key.limits for key in stored(url)} == {keys.KeyLimits(60, 9000, 4)}
    assert listed(motet)[0]["limits"] == {"requests_per_minute": 60, "tokens_per_minute": 9000, "concurrency": 4}


def test_a_hashed_key_has_its_limits_in_its_line(motet: Motet) -> None:
    line = motet("key", "hash", "--tenant", "acme", *LIMITS[:2], stdin=str(keys.new_key())).stdout
    assert keys.from_line(line).limits == keys.KeyLimits(requests_per_minute=60)
    assert keys.to_line(keys.from_line(line)) == line.strip()
    for wrong in (
        {"rpm": 1},
        {"concurrency": 0},
        {"concurrency": -1},
        {"concurrency": True},
        {"tokens_per_minute": 10**13},
        [1],
    ):
        with pytest.raises(ValueError, match="limits"):
            keys.from_line(json.dumps(json.loads(line) | {"limits": wrong}))


@pytest.mark.parametrize("option", LIMITS[::2])
def test_a_limit_of_nothing_is_refused(motet: Motet, option: str) -> None:
    done = motet("key", "create", "--tenant", "acme", option, "0")
    assert done.status == 2
    assert option in done.stderr


# ------------------------------------------------------------------------------------------------- bound to a namespace

UID = "0a1b2c3d-0000-4000-8000-00000000000f"


def test_a_key_is_bound_to_the_namespace_with_that_uid_and_so_is_its_successor(motet: Motet, url: str) -> None:
    done = motet("key", "create", "--tenant", "acme", "--namespace-uid", UID)
    assert f"tenant acme, only for the namespace with uid {UID}, scope user" in done.stderr
    assert "namespace" not in motet("key", "create", "--tenant", "acme").stderr
    successor = motet("key", "rotate", id_of(done.key)).key
    bound = {key.id for key in stored(url) if key.tenant_uid == UID}
    assert bound == {id_of(done.key), id_of(successor)}
    assert {one["id"] for one in listed(motet) if one["namespace_uid"] == UID} == bound
    table = motet("key", "ls").stdout.splitlines()
    assert "namespace uid" in table[0]
    assert sum(UID in line for line in table) == 2


def test_without_bound_keys_the_list_has_no_column_for_them(motet: Motet) -> None:
    motet("key", "create", "--tenant", "acme")
    assert "namespace uid" not in motet("key", "ls").stdout


def test_a_hashed_key_is_bound_in_its_line(motet: Motet) -> None:
    made = keys.new_key()
    line = motet("key", "hash", "--tenant", "acme", "--namespace-uid", UID, stdin=str(made)).stdout
    assert keys.from_line(line).tenant_uid == UID
    assert keys.to_line(keys.from_line(line)) == line.strip()
    for wrong in ("acme", "", 7):
        with pytest.raises(ValueError, match="tenant_uid"):
            keys.from_line(json.dumps(json.loads(line) | {"tenant_uid": wrong}))


@pytest.mark.parametrize("verb", ["create", "hash"])
def test_what_is_not_a_uid_is_refused_with_the_command_that_prints_it(motet: Motet, verb: str) -> None:
    done = motet("key", verb, "--tenant", "acme", "--namespace-uid", "acme", stdin=str(keys.new_key()))
    assert done.status != 0
    assert done.stdout == ""
    assert "kubectl get namespace acme -o jsonpath={.metadata.uid}" in done.stderr


def test_all_keys_of_a_tenant_are_revoked_at_once(motet: Motet, url: str) -> None:
    ours = [motet("key", "create", "--tenant", "acme").key for _ in range(2)]
    theirs = motet("key", "create", "--tenant", "acme-2").key
    motet("key", "revoke", id_of(ours[0]))
    done = motet("key", "revoke", "--tenant", "acme")
    assert done.status == 0
    assert "Of tenant acme's 2 keys 1 is revoked now" in done.stderr
    known = stored(url)
    for key in ours:
        with pytest.raises(NotAuthenticated, match="revoked"):
            opens(known, key)
    assert opens(known, theirs).tenant == "acme-2"
    assert "keys were all revoked before" in motet("key", "revoke", "--tenant", "acme").stderr


@pytest.mark.parametrize("made", [True, False])
def test_a_tenant_without_keys_is_an_error(motet: Motet, made: bool) -> None:
    if made:
        motet("key", "create", "--tenant", "acme")
    done = motet("key", "revoke", "--tenant", "acne")
    assert done.status != 0
    assert "tenant acne has no keys" in done.stderr


@pytest.mark.parametrize("both", [True, False])
def test_revoke_takes_either_an_id_or_a_tenant(motet: Motet, both: bool) -> None:
    done = motet("key", "revoke", *([NOBODYS, "--tenant", "acme"] if both else []))
    assert done.status != 0
    assert "either the ID of a key, or --tenant NAMESPACE" in done.stderr
