"""Decides whether callers need an API key. Reads the keys periodically and records which are used."""

import asyncio
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

import structlog

from motet.clock import Clock, every
from motet.errors import MotetError, SetupError, StoreUnavailable
from motet.keys import ApiKey
from motet.own_thread import OwnThread
from motet.settings import Database, ProcessSettings
from motet_gateway.identity.bounded_call import BoundedCall
from motet_gateway.identity.caller import Caller
from motet_gateway.identity.key_sources import Change, DatabaseKeys, FileKeys, KeySource, NoKeys
from motet_gateway.identity.keyring import Keyring
from motet_gateway.settings import Settings

log = structlog.get_logger(__name__)

FIRST_KEY = "motet key create --tenant default"
STORE_TIMEOUT_SECONDS = 10.0
"""After this long without an answer the store counts as down."""
STORE_CLOSE_SECONDS = 5.0
"""How long the store may take to close. Then the gateway ends without it."""
NOTE_SECONDS = 60.0
"""How often the use of keys is recorded."""


def source_of(settings: Settings, process: ProcessSettings, database: Database, clock: Clock) -> KeySource:
    """Raises SetupError if the database's URL isn't valid."""
    if settings.auth == "none":
        return NoKeys()
    if settings.keys_file is not None:
        return FileKeys(settings.keys_file)
    return DatabaseKeys(database.url(process), clock=clock)


class KeyAccess:
    def __init__(
        self,
        settings: Settings,
        source: KeySource,
        *,
        gone: Callable[[Mapping[str, str]], None],
        memory: Path | None = None,
        clock: Clock,
        today: Callable[[], datetime],
    ) -> None:
        """`gone` is called with the ids of keys that were valid until now, each with the reason why it no longer is.
        `memory` is a file that exists once a key was created. It counts if the store has lost the keys."""
        self._settings, self._source = settings, source
        self._memory, self._clock, self.today = memory, clock, today
        self.keyring = Keyring(
            trusted_seconds=settings.keys_trusted_seconds,
            between_seconds=settings.keys_read_seconds + STORE_TIMEOUT_SECONDS,
            gone=gone,
        )
        self._thread = OwnThread("keys-were-made")
        self._reading, self._noting, self._remembering = (BoundedCall(STORE_TIMEOUT_SECONDS) for _ in range(3))
        self._open_until_keys = settings.auth is None and settings.keys_file is None and settings.is_local
        self._required: bool | None = None if self._open_until_keys else settings.auth != "none"
        """None: not known now. No caller is let in before the gateway knows that no key was created."""
        self._unreadable_logged = self._unwritten_logged = self._unknown_logged = False
        """Each outage is logged once, although the gateway tries again every few seconds."""
        self._written: dict[str, datetime] = {}
        """The hour for which the use of each key was last recorded."""

    async def begin(self) -> None:
        """Read the keys for the first time. Raises SetupError if the gateway would let everyone in unintentionally."""
        settings = self._settings
        if settings.auth == "none":
            log.warning(
                "authentication_disabled",
                host=settings.host,
                reason="With MOTET_GATEWAY_AUTH=none every caller is tenant default.",
            )
            return
        await self.read()
        if self.keyring.store_is_down or self.keyring.has_keys:
            return
        if settings.auth is None and settings.keys_file is None and not settings.is_local:
            raise SetupError(
                f"there are no API keys, so anyone who reaches {settings.host} could use the gateway. "
                f"Create a key first: {FIRST_KEY} (or allow everyone with MOTET_GATEWAY_AUTH=none)."
            )
        if self._required:
            log.warning("no_api_keys", hint=f"Every request gets 401 until you create a key: {FIRST_KEY}")

    async def run(self) -> None:
        """Ends by cancellation."""
        if self._settings.auth == "none":
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(every(self._settings.keys_read_seconds, self.read, name="reading API keys"))
                tasks.create_task(every(NOTE_SECONDS, self.note_use, name="noting which API keys are used"))
        finally:
            await self._reading.stop()
            await self._noting.stop()
            await self._remembering.stop()
            self._thread.close()
            try:
                await BoundedCall(STORE_CLOSE_SECONDS).ask(self._source.close)
            except StoreUnavailable as error:
                log.warning("key_store_close_failed", reason=str(error))

    def read_age(self) -> float:
        """Seconds since keys were last read; infinite before the first time, 0 if no key is required."""
        return 0.0 if self._settings.auth == "none" else self._clock() - self.keyring.read_at

    def unready_reason(self) -> str:
        """Why the gateway cannot check keys; empty: it can. It has read the keys even if there are none."""
        if self._settings.auth == "none" or math.isfinite(self.keyring.read_at):
            return ""
        return "API keys have not been read yet: the key store does not answer"

    def needs_key(self) -> bool:
        """Whether a caller needs a key. Raises StoreUnavailable if that isn't known."""
        if self._required is None:
            raise StoreUnavailable(
                "The gateway cannot find out whether it requires API keys, because the key store does not answer. "
                "Try again soon."
            )
        return self._required

    def ended_reason(self, caller: Caller) -> str:
        """Why requests of that caller must end; empty: they go on."""
        return self.keyring.ended_reason(caller, self.today()) if caller.key_id else ""

    def open(self, credential: str) -> Caller:
        """The caller with this key. Raises NotAuthenticated, or StoreUnavailable if the key can't be checked."""
        return self.keyring.open(credential, now=self.today(), at=self._clock())

    def namespaces_are(self, uids: Mapping[str, str]) -> None:
        """All namespaces that exist, each with its uid: keys that are bound to another uid end now."""
        self.keyring.namespaces_are(uids, now=self.today())

    async def read(self) -> None:
        """Read what has changed since the last reading."""
        ring = self.keyring
        try:
            found = await self._reading.ask(self._source.read)
        except SetupError:
            raise
        except Exception as error:  # after any error, known keys must not be trusted for ever
            if not self._unreadable_logged:
                log.error(
                    "api_keys_unreadable",
                    reason=str(error) or type(error).__name__,
                    hint=f"Known keys stay valid for {self._settings.keys_trusted_seconds:g} s after the last reading.",
                    exc_info=not isinstance(error, MotetError),
                )
            self._unreadable_logged = True
            ring.not_read(self.today())
            if self._open_until_keys:  # the first key may have been created meanwhile
                self._required = None
            return
        if self._unreadable_logged:
            self._unreadable_logged = False
            log.info("api_keys_readable_again")
        if found is None:
            ring.unchanged(now=self.today(), at=self._clock())
        else:
            self._learn(found)
            self._source.applied()
        if self._open_until_keys and ring.has_keys:
            self._open_until_keys, self._required = False, True
            await self._remember()
        elif self._open_until_keys:
            self._required = await self._were_keys_made()

    def _learn(self, found: list[ApiKey] | Change) -> None:
        ring = self.keyring
        if isinstance(found, Change):
            log.info("api_keys_changed", keys=len(found.keys), gone=len(found.gone))
            ring.change(found.keys, found.gone, now=self.today(), at=self._clock())
            return
        if found or ring.has_keys:
            log.info("api_keys_read", keys=len(found))
        ring.replace(found, now=self.today(), at=self._clock())

    async def _remember(self) -> None:
        """Note that a key was created."""
        if (memory := self._memory) is None:
            return
        try:
            await self._remembering.ask(lambda: self._thread.run(memory.touch))
        except (OSError, StoreUnavailable) as error:
            log.warning("keys_made_note_failed", file=str(memory), reason=str(error))

    async def _were_keys_made(self) -> bool:
        """Whether the note exists. True also if it can't be read: a network folder may not answer at all."""
        if (memory := self._memory) is None:
            return False
        there = True
        try:
            await self._remembering.ask(lambda: self._thread.run(memory.stat))
        except FileNotFoundError:
            there = False
        except (OSError, StoreUnavailable) as error:
            if not self._unknown_logged:
                log.warning("keys_made_note_unreadable", file=str(memory), reason=str(error))
            self._unknown_logged = True
            return True
        self._unknown_logged = False
        return there

    async def note_use(self) -> None:
        """Record, to the hour, which keys were used since the last time."""
        now = self.today()
        hour = now.replace(minute=0, second=0, microsecond=0)
        used = self.keyring.take_used()
        new = {id_ for id_ in used if self._written.get(id_) != hour}
        if not new:
            return
        try:
            await self._noting.ask(lambda: self._source.note_use(new, at=now))
        except MotetError as error:
            if not self._unwritten_logged:
                log.warning("key_use_write_failed", reason=str(error))
            self._unwritten_logged = True
            return
        self._unwritten_logged = False
        self._written.update(dict.fromkeys(new, hour))
