"""kopf as an engine for watches, and as nothing else: it lists, watches and comes back; it writes nothing.

Each engine has a thread and an event loop of its own. kopf cancels every task of the loop in which one of its engines
ends, and ends an engine in ordinary weather; so an ended engine is started again here, and nothing else notices.
"""

import asyncio
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import aiohttp
import kopf
import structlog

from motet.kube import FORBIDDEN, NOT_FOUND, Credentials, authorization, ssl_context
from motet.resources import GROUP
from motet_operator.cluster.kinds import CHILDREN, Kind, Object

log = structlog.get_logger(__name__)

logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # that it handles no signals is on purpose

SERVER_SECONDS = 290.0
CLIENT_SECONDS = 300.0
INACTIVE_SECONDS = 70.0
"""Bookmarks come every minute: a watch that says nothing for longer is dead, whatever its connection looks like."""

TOKEN_SECONDS = 600.0
"""After so long kopf logs in again: a projected token lives an hour or more."""

FIRST_RESTART_SECONDS = 0.5
LAST_RESTART_SECONDS = 5.0
MOST_IN_A_SLICE = 200

STOP_SECONDS = 0.5
"""kopf takes its time to end. Nothing of it is worth waiting for."""

What = Literal["seen", "deleted"]
Deliver = Callable[[Kind, What, Object], None]


class Waits:
    """Jittered waits without an end: kopf gives up when they are used up."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __iter__(self) -> Iterator[float]:
        wait = FIRST_RESTART_SECONDS
        while True:
            yield wait * random.uniform(0.5, 1.0) * self._scale  # noqa: S311
            wait = min(LAST_RESTART_SECONDS, wait * 2)


class Heard:
    """When each watch last said anything. Written by the engines' threads, read by ours.

    A watch that the server refuses, or whose kind is gone, cannot say anything: it is no watch that has died.
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


class Engine:
    """One kopf engine: some kinds, everywhere or in some namespaces."""

    def __init__(
        self,
        name: str,
        kinds: Sequence[Kind],
        namespaces: Sequence[str],
        credentials: Credentials,
        heard: Heard,
        *,
        deliver: Deliver,
        restarted: Callable[[], None],
        time_scale: float = 1.0,
    ) -> None:
        self._name, self._kinds, self._namespaces = name, kinds, namespaces
        self._credentials, self._heard, self._scale = credentials, heard, time_scale
        self._deliver, self._restarted = deliver, restarted
        self._arrived: deque[tuple[Kind, What, Object]] = deque()
        self._scheduled = threading.Event()
        self._ours = asyncio.get_running_loop()
        self._end_this_life: Callable[[], None] = lambda: None
        self._logged_in = False

    def restart_if_it_watches(self, kind: Kind) -> None:
        """kopf looks once for the kinds there are: one that has come since is watched from the next start on."""
        if kind in self._kinds:
            self._end_this_life()

    async def run(self) -> None:
        """Until cancelled."""
        stopping, done = threading.Event(), asyncio.Event()

        def live() -> None:
            try:
                self._live(stopping)
            finally:
                self._tell(done.set)

        thread = threading.Thread(target=live, name=f"watch {self._name}", daemon=True)
        thread.start()
        try:
            await done.wait()
            raise RuntimeError(f"the watch layer {self._name} has ended for good")
        finally:
            stopping.set()
            self._end_this_life()
            await asyncio.to_thread(thread.join, STOP_SECONDS)

    # ---------------------------------------------------------------------------------------- in the engine's thread

    def _live(self, stopping: threading.Event) -> None:
        waits = iter(Waits(self._scale))
        while not stopping.is_set():
            began = time.monotonic()
            try:
                asyncio.run(self._engine(stopping))
            except BaseException as error:  # whatever ended it, it starts again
                log.warning("the watch layer ended and starts again", engine=self._name, error=f"{error!r:.500}")
            if stopping.is_set():
                return
            if time.monotonic() - began > 60 * self._scale:
                waits = iter(Waits(self._scale))
            self._tell(self._restarted)
            stopping.wait(next(waits))

    async def _engine(self, stopping: threading.Event) -> None:
        loop = asyncio.get_running_loop()
        flag = asyncio.Event()

        def end() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(flag.set)

        self._end_this_life, self._logged_in = end, False
        if stopping.is_set():
            return
        await kopf.operator(
            registry=self._registry(),
            settings=self._settings(),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=flag,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._login)
        for kind in self._kinds:
            kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Callable[..., Any]:
        async def seen(event: Any, **_: object) -> None:
            self._arrived.append((kind, "deleted" if event["type"] == "DELETED" else "seen", event["object"]))
            if not self._scheduled.is_set():
                self._scheduled.set()
                self._tell(self._hand_over)

        return seen

    async def _login(self, **_: object) -> kopf.AiohttpSession:
        # The first time nobody has refused anything, and reading again so soon would keep everybody waiting.
        refused, self._logged_in = self._logged_in, True
        configuration = await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._credentials.configuration(refused=refused), self._ours)
        )
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=ssl_context(configuration)),
            headers=authorization(configuration),
            response_class=_listening(self._heard),
        )
        return kopf.AiohttpSession(
            server=configuration.host,
            aiohttp_session=session,
            expiration=datetime.now(UTC) + timedelta(seconds=TOKEN_SECONDS),
        )

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        scale = self._scale
        settings.networking.error_backoffs = Waits(scale)
        settings.networking.connect_timeout = 5
        settings.networking.request_timeout = 15
        settings.watching.server_timeout = max(1, int(SERVER_SECONDS * scale))
        settings.watching.client_timeout = max(2.0, CLIENT_SECONDS * scale)
        settings.watching.inactivity_timeout = INACTIVE_SECONDS * scale
        settings.watching.reconnect_backoff = scale
        settings.watching.chunk_size = 500
        for kind in CHILDREN:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = f"{GROUP}/pool"
        settings.scanning.disabled = True
        settings.posting.enabled = False
        settings.persistence.finalizer = f"{GROUP}/finalizer"  # never used
        settings.persistence.progress_storage = kopf.StatusProgressStorage(name="motet")  # never used
        settings.queueing.worker_limit = None
        settings.queueing.exit_timeout = 1.0
        settings.process.ultimate_exiting_timeout = None  # it would kill the whole process
        settings.execution.max_workers = 1
        return settings

    def _tell(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the process ends, and its loop has ended already
            self._ours.call_soon_threadsafe(what)

    # ------------------------------------------------------------------------------------------------ in our thread

    def _hand_over(self) -> None:
        self._scheduled.clear()
        for _ in range(MOST_IN_A_SLICE):
            try:
                kind, what, it = self._arrived.popleft()
            except IndexError:
                return
            self._deliver(kind, what, it)
        self._scheduled.set()
        self._ours.call_soon(self._hand_over)


def _listening(heard: Heard) -> type[aiohttp.ClientResponse]:
    """Responses that note when a watch says something, bookmarks included, or that it may not: kopf keeps that to
    itself."""

    class Listening(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            await super().start(connection)
            path = self.url.path
            if self.status in (FORBIDDEN, NOT_FOUND):
                heard.forget(path)
            elif self.status == 200 and self.url.query.get("watch") == "true":
                heard.note(path)
                self.content = _Chunks(self.content, lambda: heard.note(path))  # type: ignore[assignment]
            return self

    return Listening


class _Chunks:
    """A response's content, read as before."""

    def __init__(self, content: aiohttp.StreamReader, heard: Callable[[], None]) -> None:
        self._content, self._heard = content, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> Any:
        async for chunk in self._content.iter_chunked(size):
            self._heard()
            yield chunk
