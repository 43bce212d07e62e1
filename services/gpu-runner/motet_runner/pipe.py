"""The engine's end of the connection to its service: whole pickled messages over a socket, without ever blocking on it.

Both ends are ours, started together from one installation: that is why pickle is good enough here and nowhere else.
A message is eight bytes of length and that many bytes.
"""

import pickle
import select
import socket
import struct
from typing import Any

HEADER = struct.Struct("<Q")
READ_BYTES = 1 << 18


def pack(message: object) -> bytes:
    body = pickle.dumps(message, protocol=5)
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    return pickle.loads(body)  # noqa: S301 - from our own other half


class Pipe:
    """What the service has not read yet waits here, in memory: a busy service never stops an iteration."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._in = bytearray()
        self._out = bytearray()

    def send(self, message: object) -> None:
        self._out += pack(message)
        self._flush()

    def exchange(self, wait: float | None) -> list[Any]:
        """Messages that have come, waiting at most `wait` seconds (None: for ever) for the first.

        Raises EOFError once the service has gone.
        """
        writing = [self._socket] if self._out else []
        readable, writable, _ = select.select([self._socket], writing, [], wait)
        while wait is None and not readable:
            if writable:
                self._flush()
            writing = [self._socket] if self._out else []
            readable, writable, _ = select.select([self._socket], writing, [], None)
        if self._out:
            self._flush()
        if readable:
            self._read()
        return self._messages()

    def receive(self) -> Any:
        """The next single message; for the greeting, before anything else is under way."""
        while not (messages := self.exchange(None)):
            pass
        first, *rest = messages
        assert not rest
        return first

    def flush(self) -> None:
        """Wait until all is written: what has to be known even if this process ends now."""
        while self._out:
            select.select([], [self._socket], [])
            self._flush()

    def _flush(self) -> None:
        while self._out:
            try:
                written = self._socket.send(self._out)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                raise EOFError from None
            del self._out[:written]

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                raise EOFError from None
            if not data:
                raise EOFError
            self._in += data
            if len(data) < READ_BYTES:
                return

    def _messages(self) -> list[Any]:
        messages = []
        while len(self._in) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._in)
            end = HEADER.size + size
            if len(self._in) < end:
                break
            messages.append(unpack(bytes(memoryview(self._in)[HEADER.size : end])))
            del self._in[:end]
        return messages
