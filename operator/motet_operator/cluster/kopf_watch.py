"""kopf as a `Watch`, and nothing more: it lists, watches and reconnects; it writes nothing.

There are two engines: Motet's own kinds in all namespaces, and owned objects in the pools' namespaces. Each has its own
thread and event loop. kopf ends at any error of a watch, so an engine that ended is started again here, without effect
on the rest. Its tasks are also stopped here: kopf needs five seconds or more, and never ends if a watch was just
reconnecting, because it then waits for a login that never comes.
"""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import kopf
import structlog

from motet.kube import AUDIT_ID, FORBIDDEN, NOT_FOUND, KubeCredentials, authorization, ssl_context
from motet.resources import GROUP
from motet.task_group import run_together
from motet_operator.cluster.kinds import DECLARED_KINDS, OWNED_KINDS, Kind, Object, selector
from motet_operator.cluster.watch import Listener

log = structlog.get_logger(__name__)

logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # it handles no signals, on purpose

SERVER_SECONDS = 290.0
CLIENT_SECONDS = 300.0
INACTIVE_SECONDS = 70.0
"""Bookmarks come every minute: a watch that is silent for longer is dead, even if its connection looks healthy."""

TOKEN_SECONDS = 600.0
"""kopf logs in again after this time: a projected token is valid for an hour or more."""

FIRST_RESTART_SECONDS = 0.5
LAST_RESTART_SECONDS = 5.0
MAX_BATCH = 200

STOP_SECONDS = 0.5
"""How long the end of the process waits for kopf."""

CANCEL_SECONDS = 0.05
"""A kopf task that ignores its cancellation is cancelled again after this time."""

ABANDON_SECONDS = 5.0
"""Tasks that have not ended by then are abandoned."""


class KopfWatch:
    def __init__(
        self,
        credentials: KubeCredentials,
        pool_namespaces: Sequence[str],
        listener: Listener,
        *,
        operator_class: str = "",
        time_scale: float = 1.0,
    ) -> None:
        self._heard = heard = LastHeard()
        self._engines = [
            KopfEngine(
                name,
                kinds,
                namespaces,
                credentials=credentials,
                heard=heard,
                listener=listener,
                operator_class=operator_class,
                time_scale=time_scale,
            )
            for name, kinds, namespaces in (("declared", DECLARED_KINDS, ()), ("runners", OWNED_KINDS, pool_namespaces))
        ]

    async def run(self) -> None:
        await run_together(*(engine.run() for engine in self._engines))

    def restart(self, kind: Kind) -> None:
        for engine in self._engines:
            engine.restart_if_watching(kind)

    def ages(self) -> Mapping[str, float]:
        return self._heard.ages()

    def forget(self, path: str) -> None:
        self._heard.forget(path)


class EndlessBackoff:
    """Endless jittered waits: kopf gives up when a finite list is used up."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __iter__(self) -> Iterator[float]:
        wait = FIRST_RESTART_SECONDS
        while True:
            yield wait * random.uniform(0.5, 1.0) * self._scale  # noqa: S311
            wait = min(LAST_RESTART_SECONDS, wait * 2)


class LastHeard:
    """When each watch last received anything. Written by the engines' threads, read by the main thread.

    A watch that the server refuses, or whose kind is not served, is forgotten: it cannot receive anything.
    """

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def note(self, path: str) -> None:
        self._at[path] = time.monotonic()

    def forget(self, path: str) -> None:
        self._at.pop(path, None)

    def ages(self) -> dict[str, float]:
        """Seconds, by the path that is watched."""
        now = time.monotonic()
        return {path: now - at for path, at in self._at.copy().items()}


class KopfEngine:
    """One kopf engine: some kinds, everywhere or in some namespaces."""

    def __init__(
        self,
        name: str,
        kinds: Sequence[Kind],
        namespaces: Sequence[str],
        *,
        credentials: KubeCredentials,
        heard: LastHeard,
        listener: Listener,
        operator_class: str = "",
        time_scale: float = 1.0,
    ) -> None:
        self._name, self._kinds, self._namespaces, self._class = name, kinds, namespaces, operator_class
        self._credentials, self._heard, self._scale = credentials, heard, time_scale
        self._listener = listener
        self._arrived: deque[tuple[Kind, bool, Object]] = deque()
        self._scheduled = threading.Event()
        self._our_loop = asyncio.get_running_loop()
        self._stop_run: Callable[[], None] = lambda: None
        self._logged_in = False
        self._sessions: list[aiohttp.ClientSession] = []

    def restart_if_watching(self, kind: Kind) -> None:
        """kopf discovers kinds once, and continues from the last version that it saw. A kind that is new, or whose
        versions went back, needs a restart."""
        if kind in self._kinds:
            self._stop_run()

    async def run(self) -> None:
        """Until cancelled."""
        stopping, done = threading.Event(), asyncio.Event()

        def run_thread() -> None:
            try:
                self._run_until_stopped(stopping)
            finally:
                self._call_in_our_loop(done.set)

        thread = threading.Thread(target=run_thread, name=f"watch {self._name}", daemon=True)
        thread.start()
        try:
            await done.wait()
            raise RuntimeError(f"the watch layer {self._name} has ended for good")
        finally:
            stopping.set()
            self._stop_run()
            await asyncio.to_thread(thread.join, STOP_SECONDS)

    # ---------------------------------------------------------------------------------------- in the engine's thread

    def _run_until_stopped(self, stopping: threading.Event) -> None:
        backoff = iter(EndlessBackoff(self._scale))
        while not stopping.is_set():
            began = time.monotonic()
            try:
                self._run_once(stopping)
            except BaseException as error:  # whatever the error is, start again
                log.warning("watch_restarted", engine=self._name, error=f"{error!r:.500}")
            if stopping.is_set():
                return
            if time.monotonic() - began > 60 * self._scale:
                backoff = iter(EndlessBackoff(self._scale))
            self._call_in_our_loop(lambda: self._listener.restarted(self._name))
            stopping.wait(next(backoff))

    def _run_once(self, stopping: threading.Event) -> None:
        loop = asyncio.new_event_loop()  # `asyncio.run` would wait for all tasks without a limit
        loop.set_exception_handler(lambda *_: None)  # kopf has logged the errors, and one of them is raised here
        try:
            loop.run_until_complete(self._engine(stopping))
        finally:
            loop.close()

    async def _engine(self, stopping: threading.Event) -> None:
        loop = asyncio.get_running_loop()
        flag = asyncio.Event()

        def end() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(flag.set)

        self._stop_run, self._logged_in = end, False
        if stopping.is_set():
            return
        try:
            tasks = await kopf.spawn_tasks(
                registry=self._registry(),
                settings=self._settings(),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=self._namespaces,
            )
            ended = asyncio.create_task(flag.wait())
            done, _ = await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self._end_everything()

    async def _end_everything(self) -> None:
        deadline = time.monotonic() + ABANDON_SECONDS
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            if time.monotonic() > deadline:
                log.warning("watch_stop_timeout", engine=self._name, tasks=len(left))
                break
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=CANCEL_SECONDS)
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            await session.close()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._login)
        for kind in self._kinds:
            kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Callable[..., Any]:
        async def seen(event: Any, **_: object) -> None:
            self._arrived.append((kind, event["type"] == "DELETED", event["object"]))
            if not self._scheduled.is_set():
                self._scheduled.set()
                self._call_in_our_loop(self._hand_over)

        return seen

    async def _login(self, **_: object) -> kopf.AiohttpSession:
        # At the first login no credentials were refused, and reading them again would only cost time.
        refused, self._logged_in = self._logged_in, True
        configuration = await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._credentials.configuration(refused=refused), self._our_loop)
        )
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=ssl_context(configuration)),
            headers=authorization(configuration),
            response_class=_listening(self._heard, self._notify_opened),
        )
        self._sessions.append(session)
        return kopf.AiohttpSession(
            server=configuration.host,
            aiohttp_session=session,
            expiration=datetime.now(UTC) + timedelta(seconds=TOKEN_SECONDS),
        )

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        scale = self._scale
        settings.networking.error_backoffs = EndlessBackoff(scale)
        settings.networking.connect_timeout = 5
        settings.networking.request_timeout = 15
        settings.watching.server_timeout = max(1, int(SERVER_SECONDS * scale))
        settings.watching.client_timeout = max(2.0, CLIENT_SECONDS * scale)
        settings.watching.inactivity_timeout = INACTIVE_SECONDS * scale
        settings.watching.reconnect_backoff = scale
        settings.watching.chunk_size = 500
        for kind in self._kinds:
            if labels := selector(kind, self._class):
                settings.watching.label_selectors[kind.group, kind.version, kind.plural] = labels
        settings.scanning.disabled = True
        settings.posting.enabled = False
        settings.persistence.finalizer = f"{GROUP}/finalizer"  # never used
        settings.persistence.progress_storage = kopf.StatusProgressStorage(name="motet")  # never used
        settings.queueing.worker_limit = None
        settings.queueing.exit_timeout = 1.0
        settings.process.ultimate_exiting_timeout = None  # it would kill the whole process
        settings.execution.max_workers = 1
        return settings

    def _notify_opened(self, path: str, since: int) -> None:
        self._call_in_our_loop(lambda: self._listener.opened(path, since))

    def _call_in_our_loop(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the process is ending, and the loop is closed
            self._our_loop.call_soon_threadsafe(what)

    # ------------------------------------------------------------------------------------------------ in our thread

    def _hand_over(self) -> None:
        self._scheduled.clear()
        for _ in range(MAX_BATCH):
            try:
                kind, gone, it = self._arrived.popleft()
            except IndexError:
                return
            it.setdefault("apiVersion", kind.api_version)
            it.setdefault("kind", kind.name)
            (self._listener.deleted if gone else self._listener.seen)(kind, it)
        self._scheduled.set()
        self._our_loop.call_soon(self._hand_over)


def _listening(heard: LastHeard, opened: Callable[[str, int], None]) -> type[aiohttp.ClientResponse]:
    """A response class that notes when a watch opens, receives anything (also bookmarks), or is refused: kopf does not
    tell."""

    class Listening(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            path = self.url.path
            # Of what does not exist, a proxy may know nothing.
            if self.status == FORBIDDEN or (self.status == NOT_FOUND and AUDIT_ID in self.headers):
                heard.forget(path)
            elif self.status == 200 and self.url.query.get("watch") == "true":
                heard.note(path)
                opened(path, int(self.url.query.get("resourceVersion") or 0))
                self.content = _Chunks(self.content, lambda: heard.note(path))  # type: ignore[assignment]
            return self

    return Listening


class _Chunks:
    """A response's content that notes each received chunk."""

    def __init__(self, content: aiohttp.StreamReader, heard: Callable[[], None]) -> None:
        self._content, self._heard = content, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> Any:
        async for chunk in self._content.iter_chunked(size):
            self._heard()
            yield chunk
