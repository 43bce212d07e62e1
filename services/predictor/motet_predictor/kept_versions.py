"""Keeps the predictor's versions in the database: loads them once, writes new ones in parts, with roles and figures,
and takes orders of `motet predict`. A version that cannot be read changes nothing: what serves goes on, and a line says
why."""

import asyncio
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from math import inf

import structlog

from motet.clock import Clock
from motet.errors import StoreUnavailable
from motet.store import Store
from motet.store import length_samples as states
from motet.store import predictor_versions as table
from motet.store.predictor_versions import PART_BYTES, VersionRecord
from motet.store.tables import now
from motet_predictor.fitted_bytes import MAX_FITTED_BYTES, from_bytes, to_bytes
from motet_predictor.kept_comparisons import read_comparisons, write_comparisons
from motet_predictor.kept_corrections import ChangedCorrections, read_corrections, write_changes
from motet_predictor.prompt_model import VERSION, PromptModel
from motet_predictor.prompt_version import Fitted, PromptVersion
from motet_predictor.version_figures import as_json, restore, with_decision
from motet_predictor.versions import Role, Versions

log = structlog.get_logger(__name__)

MAX_VERSIONS = 8
"""In the database, with those that serve and that estimate in shadow."""
FIGURES_SECONDS = 30.0
"""How often figures are written while roles do not change."""
MAX_REASON = 500

_UNWRITTEN_HINT = "They stay in memory, and are lost if the predictor ends before they are written."


class KeptVersions:
    def __init__(self, store: Store, model: PromptModel, clock: Clock) -> None:
        self._store = store
        self._model = model
        self._clock = clock
        self._number = 0
        """Of the newest version"""
        self._parts: list[tuple[str, int, bytes]] = []
        """That are not written yet: version, number, bytes"""
        self._corrections = ChangedCorrections()
        self._written: dict[str, tuple[PromptVersion, Role]] = {}
        self._figures_at = clock()
        self._may_write = 0
        self._loaded = False
        self._failed = False
        """Whether the last write did"""
        self._turn = asyncio.Lock()
        """Offers, orders and writes wait for one another"""

    @property
    def loaded(self) -> bool:
        return self._loaded

    async def offer(self, data: bytes) -> None:
        """Let what a refit has made estimate in shadow. Raises ValueError if it is damaged."""
        fitted = await asyncio.to_thread(from_bytes, data)
        async with self._turn:
            self._number += 1
            version = self._model.version_of(f"{VERSION}.{self._number}", fitted)
            version.made = now().timestamp()
            self._model.versions.offer(version)
            log.info("version_in_shadow", version=version.name, adapters=len(fitted.corrections))
            self._wait(version, data)
            with self._surviving():
                await self._add(version)

    async def flush(self, at_most: int, *, last: bool = False) -> None:
        """Write what has changed: of weights and corrections about `at_most` bytes, the rest the next time; figures and
        comparisons every 30 seconds, and the `last` time. Never raises but by cancellation: the predictor estimates
        without a database, too."""
        async with self._turn:
            if last:
                self._figures_at = -inf
            with self._surviving():
                if not self._loaded:
                    await self._load()
                due = await self._write_roles()
                await write_changes(self._store, self._model)
                await self._write_parts(at_most)
                if due:
                    self._corrections.are_due(self._model.versions)
                    self._may_write -= await write_comparisons(self._store, self._model.versions)
                self._may_write -= await self._corrections.write(self._store, self._may_write)
                self._failed = False

    async def take_order(self) -> None:
        """Let the version serve that `motet predict` has ordered, if there is one."""
        async with self._turn:
            with self._surviving():
                if self._loaded and (ordered := await table.ordered_version(self._store)) is not None:
                    await self._serve(ordered)
                    await table.end_order(self._store, ordered)  # last, so that an outage does not lose it

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Everything is tried again the next time. The first error is logged."""
        try:
            yield
        except Exception as error:  # a row that others wrote can be damaged in any way
            if not self._failed:
                log.warning("versions_not_written", reason=str(error) or repr(error), hint=_UNWRITTEN_HINT)
            self._failed = True
            self._written.clear()  # it may be another, empty database when it returns

    async def _serve(self, ordered: VersionRecord) -> None:
        known = next((one for one in self._model.versions if one.name == ordered.version), None)
        version = known
        if version is None:
            await write_changes(self._store, self._model)
            version = await self._read(ordered)
            if version is not None:
                self._restart_changed([version])
        if version is not None:
            self._model.versions.serve(version)
            version.decision = "ordered"
            log.info("version_serves", version=version.name, why=version.decision)
            await self._write_roles()

    async def _load(self) -> None:
        await write_changes(self._store, self._model)
        records = await table.all_versions(self._store)
        self._number = max([self._number, *map(_number_of, records)])
        found: dict[str, PromptVersion] = {}
        for record in records:
            if record.role in (Role.SERVING.value, Role.FORMER.value, Role.CANDIDATE.value):
                version = await self._read(record)
                if version is not None:
                    found.setdefault(record.role, version)
        former, candidate = found.get(Role.FORMER.value), found.get(Role.CANDIDATE.value)
        serving = found.get(Role.SERVING.value) or former or self._model.serving
        versions = Versions(serving)
        versions.former = former if former is not serving else None
        if candidate is not None:
            versions.offer(candidate)
        await read_comparisons(self._store, versions)
        self._restart_changed(found.values())
        self._model.versions = versions
        self._loaded = True
        log.info("versions_loaded", serving=self._model.serving.name, known=len(records))

    async def _read(self, record: VersionRecord) -> PromptVersion | None:
        """A version with its weights; None if it is of another layout, or damaged. Changes were written before."""
        try:
            if record.version == self._model.lengths.version:
                version = self._model.plain_version()
            else:
                changed = await states.changed_since(self._store, self._model.lengths.version, record.created)
                version = self._model.version_of(record.version, await self._weights(record), changed=changed)
                version.made, version.digest = record.created.timestamp(), record.digest
            restore(version, record.figures)
            older = await states.corrected_before_change(
                self._store, record.version, noted_by=self._model.lengths.version
            )
            await read_corrections(self._store, version, limit=self._model.max_adapters, restarted=older)
        except StoreUnavailable:
            raise
        except Exception as error:  # damaged rows end in errors of many kinds
            log.warning(
                "version_unreadable",
                version=record.version,
                role=record.role,
                reason=str(error),
                hint="It does not serve. The next refit makes a new one.",
            )
            figures = with_decision(record.figures, f"does not serve: {error}"[:MAX_REASON])
            await table.set_figures(self._store, record.version, figures)  # `motet predict show` prints it
            return None
        return version

    def _restart_changed(self, read: Iterable[PromptVersion]) -> None:
        """For what changed while these were read: in them it did not count. No `await` follows until they are used."""
        for version in read:
            for one in self._model.unsaved_changes:
                version.correction(*one).restart()

    async def _weights(self, record: VersionRecord) -> Fitted:
        if not record.version.startswith(f"{VERSION}."):
            raise ValueError(f"it was made for another layout than {VERSION}")
        data = await table.load_weights(self._store, record.version, most=MAX_FITTED_BYTES)
        if len(data) != record.size or hashlib.sha256(data).hexdigest() != record.digest:
            raise ValueError(f"{len(data)} of {record.size} bytes are there, or they were changed")
        return await asyncio.to_thread(from_bytes, data)

    async def _write_roles(self) -> bool:
        """False if nothing is due."""
        if not self._written:
            await self._add_missing()
        versions = self._model.versions
        roles = {one.name: (one, versions.role_of(one.name)) for one in versions}
        moment = self._clock()
        known = {name: role for name, (_, role) in self._written.items()}
        if known == {name: role for name, (_, role) in roles.items()} and moment < self._figures_at + FIGURES_SECONDS:
            return False
        gone = {name: (one, Role.RETIRED) for name, (one, _) in self._written.items() if name not in roles}
        await table.set_roles(
            self._store,
            {
                (name, one.digest): (
                    role.value,
                    as_json(one, versions.comparison_of(one) if role is not Role.RETIRED else None),
                )
                for name, (one, role) in (roles | gone).items()
            },
        )
        self._written, self._figures_at = roles, moment
        await table.forget_retired(self._store, keep=MAX_VERSIONS)
        return True

    async def _add_missing(self) -> None:
        """Add the versions that the database does not have: it may have been replaced. Where another predictor has
        used the name, or where parts were deleted, it gets a new one."""
        there = {record.version: record for record in await table.all_versions(self._store)}
        stored = await table.stored_bytes(self._store)
        waiting = {name for name, _, _ in self._parts}

        def is_there(name: str, digest: str) -> bool:
            record = there.get(name)
            return (
                record is not None and record.digest == digest and (name in waiting or stored.get(name) == record.size)
            )

        for version in list(self._model.versions):
            if version.weights is None or is_there(version.name, version.digest):
                continue
            if version.name in there:
                self._number = max(self._number, *map(_number_of, there.values())) + 1
                version.name, before = f"{VERSION}.{self._number}", version.name
                log.warning("version_renamed", version=version.name, before=before)
            # To pack takes a quarter of a second: not each time while the database is full.
            if not any(part[:2] == (version.name, 0) for part in self._parts):
                fitted = Fitted(version.weights, dict(version.corrections))
                self._wait(version, await asyncio.to_thread(to_bytes, fitted))
            await self._add(version)

    def _wait(self, version: PromptVersion, data: bytes) -> None:
        """Let its parts wait to be written. Before the row is added: that may succeed, and its answer be lost."""
        version.digest = hashlib.sha256(data).hexdigest()
        others = {one.name for one in self._model.versions} - {version.name}
        self._parts = [part for part in self._parts if part[0] in others]
        self._parts += [
            (version.name, start // PART_BYTES, data[start : start + PART_BYTES])
            for start in range(0, len(data), PART_BYTES)
        ]

    async def _add(self, version: PromptVersion) -> None:
        record = VersionRecord(
            version=version.name,
            role=self._model.versions.role_of(version.name).value,
            created=datetime.fromtimestamp(version.made, UTC),
            size=sum(len(data) for name, _, data in self._parts if name == version.name),
            digest=version.digest,
        )
        await table.add(self._store, record)

    async def _write_parts(self, at_most: int) -> None:
        self._may_write = min(self._may_write, 0) + at_most
        while self._parts and self._may_write > 0:
            name, number, data = self._parts[0]
            if await table.add_part(self._store, name, number, data):
                self._may_write -= len(data)
                self._parts.pop(0)
            else:  # the version was deleted
                self._parts = [part for part in self._parts if part[0] != name]
                self._written.clear()  # so that it is added again if it has a role


def _number_of(record: VersionRecord) -> int:
    number = record.version.removeprefix(f"{VERSION}.")
    return int(number) if number.isdecimal() else 0
