"""The engine's end of the connection to its service: whole pickled messages over a socket. `send` never blocks.

Pickle is safe here, because one end has started the other from the same installation. No other processes exchange
pickles. A message is eight bytes with the length of its body, and the body.
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
    return pickle.loads(body)  # noqa: S301 - the other end is our own process


MAX_WAITING_BYTES = 32 << 20
"""Most engines take minutes to write this much, so only a blocked service lets so much wait."""


class Pipe:
    """Messages that the service has not read yet wait here, in memory, so that a busy service blocks no iteration. When
    the pipe is `full`, the engine must `flush` before it goes on."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._in = bytearray()
        self._out = bytearray()

    def send(self, message: object) -> None:
        self._out += pack(message)
        self._flush()

    @property
    def full(self) -> bool:
        return len(self._out) > MAX_WAITING_BYTES

    def exchange(self, wait: float | None) -> list[Any]:
        """Write what waits, and return the messages that have come. `wait`: the most seconds until the first message
        (None: no limit).

        Raises EOFError when the service has closed its end.
        """
        while True:
            writing = [self._socket] if self._out else []
            readable, _, _ = select.select([self._socket], writing, [], wait)
            self._flush()
            if readable:
                self._read()
            if readable or wait is not None:
                return self._messages()

    def receive(self) -> Any:
        """Wait for the first message, which comes alone, before the engine is loaded."""
        while not (messages := self.exchange(None)):
            pass
        first, *rest = messages
        assert not rest
        return first

    def flush(self) -> None:
        """Wait until all messages are written, so that the service gets them even if this process ends now."""
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
