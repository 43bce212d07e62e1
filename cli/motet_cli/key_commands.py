"""The commands of `motet key`: change keys in the database, or print one line for a file of keys. A secret is printed
once, alone on standard output.

Messages never repeat an argument that may be a key, because terminals and build logs keep messages.
"""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import typer
from pydantic import TypeAdapter, ValidationError

from motet import keys
from motet.errors import NotFound, SetupError, StateDirectoryError, StoreUnavailable
from motet.keys import NO_LIMITS, ApiKey, KeyLimits, KeyScope
from motet.resources.fields import DnsLabel
from motet.store import Store, migrate, open_store
from motet.store import keys as key_store
from motet.store.database import parse
from motet_cli.database import database_url, is_missing
from motet_cli.durations import duration
from motet_cli.printer import Printer
from motet_operator.local.state_directory import StateDirectory

_ID = re.compile(rf"[0-9a-f]{{{2 * keys.ID_BYTES}}}")

KEY_ONE_LINER = """python3 -c 'import secrets as s; print("motet_" + s.token_hex(8) + "_" + s.token_urlsafe(32))'"""
"""A shell command that makes a key without a database. A test checks its output."""

HOW_TO_HASH = f"""Without a database, make a key in a file of yours and print the line with its hash:

  (umask 077; {KEY_ONE_LINER} > key)
  motet key hash --tenant acme < key"""

WIDTH_OF_A_PIPE = 200

SHOWN_ONCE = "The key is shown only once: save it."


def create(
    data_dir: Path,
    *,
    tenant: str,
    scopes: str,
    expires: str | None,
    namespace_uid: str = "",
    limits: KeyLimits = NO_LIMITS,
) -> int:
    made = keys.new_key()
    key = _key(made, tenant=tenant, namespace_uid=namespace_uid, scopes=scopes, expires=expires, limits=limits)
    _check_gateways_read_them(HOW_TO_HASH)
    url = database_url(data_dir)

    async def run() -> bool:
        await migrate(url)
        async with open_store(url) as store:
            first = not await key_store.any_was_made(store)
            await key_store.add(store, key)
            return first

    first = asyncio.run(run())
    _note_keys_made(data_dir, url)
    _print_key(made)
    _print_note(f"{_description(key)} {SHOWN_ONCE}")
    if first:
        _print_note(
            "This is the first key. From now on gateways require a key from every client, also on this machine."
        )
    return 0


def ls(data_dir: Path, *, as_json: bool) -> int:
    url = database_url(data_dir)

    async def run() -> list[tuple[ApiKey, datetime | None]]:
        async with _existing_database(url) as store:
            return await key_store.all_keys(store) if store is not None else []

    found, now = asyncio.run(run()), _now()
    if as_json:
        document = {"keys": [document_of(key, used, now) for key, used in found]}
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    elif found:
        _print_table(found, now)
    else:
        _print_note("There are no keys. Make one: motet key create --tenant NAMESPACE")
    return 0


def revoke(data_dir: Path, id_: str) -> int:
    id_ = _id(id_, command="revoke")
    _check_gateways_read_them("To revoke a key, remove its line there.")
    url, now = database_url(data_dir), _now()

    async def run() -> ApiKey:
        async with _database_with_key(url, id_) as (store, key):
            await key_store.revoke(store, id_, tenant=key.tenant, at=now)
            return key

    key = asyncio.run(run())
    if key.revoked is not None:
        _print_note(f"Key {id_} of tenant {key.tenant} was already revoked at {_time(key.revoked)}.")
    else:
        _print_note(f"Key {id_} of tenant {key.tenant} is revoked. Gateways refuse it within 5 seconds.")
    return 0


def revoke_all(data_dir: Path, tenant: str) -> int:
    tenant = _tenant(tenant)
    _check_gateways_read_them("To revoke the keys of a tenant, remove its lines there.")
    url, now = database_url(data_dir), _now()

    async def run() -> tuple[int, int]:
        async with _existing_database(url) as store:
            return await key_store.revoke_all(store, tenant=tenant, at=now) if store is not None else (0, 0)

    held, revoked = asyncio.run(run())
    if not held:
        raise NotFound(f"tenant {tenant} has no keys in this database. `motet key ls` lists all keys.")
    if revoked:
        now_revoked = "1 is" if revoked == 1 else f"{revoked} are"
        _print_note(
            f"Of tenant {tenant}'s {held} keys {now_revoked} revoked now. Gateways refuse them within 5 seconds."
        )
    else:
        _print_note(f"Tenant {tenant}'s keys were all revoked before.")
    return 0


def rotate(data_dir: Path, id_: str, *, overlap: str) -> int:
    id_, overlap_time = _id(id_, command="rotate"), _duration("--overlap", overlap)
    _check_gateways_read_them(HOW_TO_HASH)
    made, url, now = keys.successor_key(id_), database_url(data_dir), _now()

    async def run() -> tuple[ApiKey, ApiKey]:
        async with _database_with_key(url, id_) as (store, old):
            new = successor(old, made, now=now)
            await key_store.rotate(store, old, new, at=now + overlap_time)
            return old, new

    old, new = asyncio.run(run())
    _print_key(made)
    _print_note(f"{_description(new)} {SHOWN_ONCE}")
    ends = min(now + overlap_time, old.expires or now + overlap_time)
    _print_note(f"The old key {id_} expires at {_time(ends)}." if ends > now else f"The old key {id_} is revoked.")
    return 0


def hash_(
    *,
    tenant: str,
    scopes: str,
    expires: str | None,
    arguments: Sequence[str],
    namespace_uid: str = "",
    limits: KeyLimits = NO_LIMITS,
) -> int:
    if arguments:
        raise SetupError(
            "do not give the key as an argument: it stays in the shell's history, and everybody on this machine can "
            f"read it. If you gave a key, do not use it any more. {HOW_TO_HASH}"
        )
    if sys.stdin.isatty():
        raise SetupError(f"standard input is a terminal: give the key in a file or a pipe. {HOW_TO_HASH}")
    read_in = sys.stdin.buffer.read(keys.MAX_KEY_LENGTH + 16).decode("ascii", errors="replace").strip()
    made = keys.parse_key(read_in)
    if made is None:
        what = "is not a key: a key has the form motet_<id>_<secret>" if read_in else "is empty"
        raise SetupError(f"standard input {what}. {HOW_TO_HASH}")
    key = _key(made, tenant=tenant, namespace_uid=namespace_uid, scopes=scopes, expires=expires, limits=limits)
    typer.echo(keys.to_line(key))
    _print_note(f"{_description(key)} The line above has the key's hash, not the key.")
    return 0


def successor(old: ApiKey, made: keys.PresentedKey, *, now: datetime) -> ApiKey:
    """The key that replaces `old`, with the same tenant, namespace and scopes. If `old` expires, the new key gets the
    lifetime that `old` had when it was made."""
    expires = now + (old.expires - old.created) if old.expires is not None else None
    return replace(old, id=made.id, hash=made.hash, created=now, expires=expires, revoked=None)


def state_of(key: ApiKey, now: datetime) -> str:
    """`active`, `expired` or `revoked`. A rotated key is active until it expires."""
    return key.refusal_reason(now) or "active"


def document_of(key: ApiKey, used: datetime | None, now: datetime) -> dict[str, Any]:
    """What `--json` prints about a key."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "namespace_uid": key.tenant_uid or None,
        "scopes": sorted(key.scopes),
        "limits": key.limits.document,
        "created": key.created,
        "expires": key.expires,
        "revoked": key.revoked,
        "last_used": used,
        "state": state_of(key, now),
    }


def _print_table(found: Sequence[tuple[ApiKey, datetime | None]], now: datetime) -> None:
    bound = any(key.tenant_uid for key, _ in found)
    limited = any(key.limits.document for key, _ in found)
    rows = [
        (
            key.id,
            key.tenant,
            *([key.tenant_uid or "-"] if bound else []),
            ",".join(sorted(key.scopes)),
            *([_limits(key.limits)] if limited else []),
            _time(key.created),
            _time(key.expires) if key.expires is not None else "never",
            _time(used) if used is not None else "-",
            state_of(key, now),
        )
        for key, used in found
    ]
    columns = (
        "id",
        "tenant",
        *(["namespace uid"] if bound else []),
        "scopes",
        *(["limits"] if limited else []),
        "created",
        "expires",
        "last used",
        "state",
    )
    Printer(width_of_a_pipe=WIDTH_OF_A_PIPE).table(columns, rows)


def _limits(limits: KeyLimits) -> str:
    parts = (
        (limits.requests_per_minute, "requests/min"),
        (limits.tokens_per_minute, "tokens/min"),
        (limits.concurrency, "at once"),
    )
    return ", ".join(f"{limit} {of}" for limit, of in parts if limit) or "-"


def _check_gateways_read_them(instead: str) -> None:
    """Raises SetupError if gateways read keys from a file and not from the database, as in a cluster."""
    if file := os.environ.get("MOTET_GATEWAY_KEYS_FILE"):
        raise SetupError(
            f"gateways read keys from {file} (MOTET_GATEWAY_KEYS_FILE), not from the database, so a change in the "
            "database has no effect. The file has lines that `motet key hash` prints; on a cluster it comes from a "
            f"Secret (`gateway.keysSecret` of the chart). {instead}"
        )


def _note_keys_made(data_dir: Path, url: str) -> None:
    """Note in the state directory that a key was made, also for gateways that start later."""
    if parse(url).get_backend_name() != "sqlite":
        return
    marker = StateDirectory.of(data_dir).data / keys.KEYS_MADE_FILE
    try:
        marker.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        _print_note(
            f"The key was made, but {marker} could not be written ({error.strerror}). This file reminds gateways to "
            "require keys if the database is lost. Make its folder writable."
        )


@asynccontextmanager
async def _existing_database(url: str) -> AsyncIterator[Store | None]:
    """The database; None if it does not exist, or has no table of keys because an older version made it. Only `create`
    makes or upgrades a database: running services may be of an older version. Raises StateDirectoryError if the
    database cannot be read."""
    if is_missing(url):
        yield None
        return
    async with open_store(url) as store:
        try:
            has_keys = await key_store.table_exists(store)
        except StoreUnavailable as error:
            raise StateDirectoryError(error.message) from error
        yield store if has_keys else None


@asynccontextmanager
async def _database_with_key(url: str, id_: str) -> AsyncIterator[tuple[Store, ApiKey]]:
    """The database, and the key with the id `id_`. Raises NotFound."""
    async with _existing_database(url) as store:
        key = await key_store.find(store, id_) if store is not None else None
        if store is not None and key is not None:
            yield store, key
            return
        raise NotFound(f"there is no key {id_} in this database. `motet key ls` lists all keys.")


def _key(
    made: keys.PresentedKey, *, tenant: str, namespace_uid: str, scopes: str, expires: str | None, limits: KeyLimits
) -> ApiKey:
    """The key that the options describe. Raises SetupError that names the wrong option."""
    now = _now()
    return ApiKey(
        id=made.id,
        tenant=_tenant(tenant),
        tenant_uid=_namespace_uid(namespace_uid, tenant),
        scopes=_scopes(scopes),
        limits=limits,
        hash=made.hash,
        created=now,
        expires=now + _duration("--expires", expires, least=timedelta(seconds=1)) if expires is not None else None,
    )


def _tenant(text: str) -> str:
    try:
        return TypeAdapter(DnsLabel).validate_python(text, strict=True)
    except ValidationError:
        near = re.sub(r"[^a-z0-9]+", "-", text.lower())[:63].strip("-")
        hint = f" Perhaps --tenant {near}?" if near else ""
        raise SetupError(
            f"--tenant {text!r} is not a valid tenant. A tenant is a namespace name: at most 63 lower-case letters, "
            f"digits and '-'. It begins and ends with a letter or digit.{hint}"
        ) from None


def _namespace_uid(text: str, tenant: str) -> str:
    if text and keys.NAMESPACE_UID.fullmatch(text) is None:
        raise SetupError(
            f"--namespace-uid {text!r} is not the uid of a namespace. This prints it: "
            f"kubectl get namespace {tenant} -o jsonpath={{.metadata.uid}}"
        )
    return text


def _scopes(text: str) -> frozenset[KeyScope]:
    names = [one.strip() for one in text.split(",")]
    if unknown := [one for one in names if one not in set(KeyScope)]:
        raise SetupError(
            f"--scopes: unknown scope {unknown[0]!r}. Choose from {', '.join(KeyScope)}, separated by commas."
        )
    return frozenset(KeyScope(one) for one in names)


def _duration(option: str, text: str, *, least: timedelta = timedelta()) -> timedelta:
    try:
        length = duration(text)
    except ValueError as error:
        raise SetupError(f"{option} {text!r} {error}.") from None
    if length < least:
        raise SetupError(f"{option} {text!r} is too short.")
    return length


def _id(text: str, *, command: str) -> str:
    if (whole := keys.parse_key(text)) is not None:
        raise SetupError(
            "that is a whole key. Do not type a key on a command line: the id is enough. "
            f"Run: motet key {command} {whole.id}"
        )
    if _ID.fullmatch(text) is None:
        raise SetupError(f"ID must be the {2 * keys.ID_BYTES} characters (0-9 and a-f) that `motet key ls` shows.")
    return text


def _description(key: ApiKey) -> str:
    scopes = f"scope{'s' if len(key.scopes) > 1 else ''} {', '.join(sorted(key.scopes))}"
    ends = f"expires at {_time(key.expires)}" if key.expires is not None else "does not expire"
    bound = f", only for the namespace with uid {key.tenant_uid}" if key.tenant_uid else ""
    limits = "".join(f", {name.replace('_', ' ')} {limit}" for name, limit in key.limits.document.items())
    return f"Key {key.id}: tenant {key.tenant}{bound}, {scopes}{limits}, {ends}."


def _time(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _print_key(made: keys.PresentedKey) -> None:
    typer.echo(str(made))


def _print_note(sentence: str) -> None:
    typer.echo(sentence, err=True)
