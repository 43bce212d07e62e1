"""One connection to the API server, for many requests: to make one takes ten times as long as a request."""

import http.client
import ssl
import threading


class ApiConnection:
    """Threads may share it: while one uses it, the others make connections of their own."""

    def __init__(self, host: str, port: int, trust: ssl.SSLContext) -> None:
        self._host, self._port, self._trust = host, port, trust
        self._kept = self._make()
        self._in_use = threading.Lock()

    def ask(self, method: str, path: str, content: str | None, kind: str) -> tuple[int, bytes]:
        """Status and body of the answer. Raises OSError if there is none."""
        if self._in_use.acquire(blocking=False):
            try:
                return self._ask_on_kept(method, path, content, kind)
            finally:
                self._in_use.release()
        return _ask(self._make(), method, path, content, kind, keep=False)

    def close(self) -> None:
        self._kept.close()

    def _make(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._host, self._port, timeout=10, context=self._trust)

    def _ask_on_kept(self, method: str, path: str, content: str | None, kind: str) -> tuple[int, bytes]:
        if self._kept.sock is not None and method == "GET":
            try:
                return _ask(self._kept, method, path, content, kind, keep=True)
            except TimeoutError:
                raise
            except OSError:  # the server may have ended meanwhile: another connection tells
                pass
        self._kept.close()
        return _ask(self._kept, method, path, content, kind, keep=True)


def _ask(
    wire: http.client.HTTPSConnection, method: str, path: str, content: str | None, kind: str, *, keep: bool
) -> tuple[int, bytes]:
    try:
        wire.request(method, path, content, {"Content-Type": kind})
        answer = wire.getresponse()
        said = answer.status, answer.read()
    except (http.client.HTTPException, OSError) as error:
        wire.close()
        if isinstance(error, OSError):
            raise
        raise OSError(str(error)) from error
    if not keep:
        wire.close()
    return said
