"""Links between a stack's gateway and its runners, which can be cut while both processes live."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from motet_operator.local.state_directory import StateDirectory
from testbed.cut_link import CutLink
from testbed.local_stack import LocalStack


class StackLinks:
    """They work in a thread of their own: who measures may block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._links: dict[str, CutLink] = {}
        self._open = AsyncExitStack()

    def cut(self, runner: str) -> None:
        self._loop.call_soon_threadsafe(self._links[runner].cut)

    def mend(self) -> None:
        for link in self._links.values():
            self._loop.call_soon_threadsafe(link.mend)

    def _run(self, work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @contextmanager
    def between(self, stack: LocalStack) -> Iterator["StackLinks"]:
        """The links stand where the runners' sockets were, and the gateway starts again: it finds them there."""
        folder = StateDirectory.of(stack.data).sockets
        names = [str(one["name"]) for one in stack.status()["services"] if one["kind"] == "runner"]
        moved = {folder / f"{name}.sock": folder / f"{name}.behind.sock" for name in names}
        links: dict[Path, int] = {}
        self._thread.start()
        try:
            for name, (path, behind) in zip(names, moved.items(), strict=True):
                path.rename(behind)
                self._links[name] = CutLink(path, f"unix:{behind}")
                self._run(self._open.enter_async_context(self._links[name].serving()))
                links[path] = path.stat().st_ino
            gone = stack.kill("gateway")
            stack.until(lambda: stack.service("gateway")["ready"] and stack.service("gateway")["pid"] != gone)
            yield self
        finally:
            # A runner that has started again meanwhile has its own socket there.
            ours = [path for path, number in links.items() if path.exists() and path.stat().st_ino == number]
            self._run(self._open.aclose())
            for path, behind in moved.items():
                if path in ours or not path.exists():
                    behind.rename(path)
                else:
                    behind.unlink()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
