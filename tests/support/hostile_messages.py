"""Messages that no honest peer sends, made from the protocol itself: a new field is tried as soon as it exists."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from math import inf, nan
from typing import Any, NoReturn

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from motet.rpc import EndStream, Link, Sessions
from motet.rpc.message_failures import handle
from motet.terms import ImpossibleTerm
from motet.transport import StatusCode

_UNSIGNED_32 = (0, 1, 2**32 - 1)
_UNSIGNED_64 = (0, 1, 2**63, 2**64 - 1)
_SIGNED_32 = (0, -1, -(2**31), 2**31 - 1)
_SIGNED_64 = (0, -1, -(2**63), 2**63 - 1)
_FLOATS = (nan, inf, -inf, -1.0, 0.0, 1e300)
UNKNOWN_VALUE = 77
"""Of an enumeration: a newer version may have it."""

_VALUES: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.TYPE_UINT32: _UNSIGNED_32,
    FieldDescriptor.TYPE_FIXED32: _UNSIGNED_32,
    FieldDescriptor.TYPE_UINT64: _UNSIGNED_64,
    FieldDescriptor.TYPE_FIXED64: _UNSIGNED_64,
    FieldDescriptor.TYPE_INT32: _SIGNED_32,
    FieldDescriptor.TYPE_SINT32: _SIGNED_32,
    FieldDescriptor.TYPE_INT64: _SIGNED_64,
    FieldDescriptor.TYPE_SINT64: _SIGNED_64,
    FieldDescriptor.TYPE_DOUBLE: _FLOATS,
    FieldDescriptor.TYPE_FLOAT: (nan, inf, -inf, -1.0, 0.0, 1e38),
    FieldDescriptor.TYPE_BOOL: (True, False),
    FieldDescriptor.TYPE_ENUM: (UNKNOWN_VALUE, -1),
    FieldDescriptor.TYPE_STRING: ("", "\0", "x" * 100_000, "../" * 9, "sha256:", "\U0010ffff"),
    FieldDescriptor.TYPE_BYTES: (b"", b"\xff" * 1000),
}


def hostile(kind: Any, *, types: tuple[int, ...] = tuple(_VALUES), like: Any = None) -> Iterator[Any]:
    """Messages of this kind, each with one field that is wrong, at any depth. All else is as in `like`, or absent."""
    if like is None:
        like = kind()
        yield kind()
    for field in kind.DESCRIPTOR.fields:
        if field.name == "more":  # a pack of messages
            continue
        if (inner := field.message_type) is None:
            yield from (_with(like, field, value) for value in _VALUES[field.type] if field.type in types)
        elif inner.GetOptions().map_entry:
            yield from _with_entries(like, field, inner, types)
        else:
            before = getattr(like, field.name)
            found = before if field.is_repeated else [before] * like.HasField(field.name)
            within = next(iter(found), None)
            for value in hostile(GetMessageClass(inner), types=types, like=within):
                yield _with(like, field, value)


def _with(like: Any, field: FieldDescriptor, value: Any) -> Any:
    message = type(like)()
    message.CopyFrom(like)
    if field.is_repeated:
        getattr(message, field.name).extend([value, value])
    elif field.message_type is not None:
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)
    return message


def _with_entries(like: Any, field: FieldDescriptor, entry: Descriptor, types: tuple[int, ...]) -> Iterator[Any]:
    names = entry.fields_by_name
    key, value = names["key"], names["value"]
    if value.message_type is not None:
        return
    for one in _VALUES[value.type]:
        if value.type in types:
            message = type(like)()
            message.CopyFrom(like)
            getattr(message, field.name)[_VALUES[key.type][-1]] = one
            yield message


def hostile_bytes(kind: Any) -> Iterator[bytes]:
    """What is no message of this kind, or one that only a newer version knows."""
    yield b"\xff"
    yield _varint(5000 << 3) + b"\x01"
    for field in kind.DESCRIPTOR.fields:
        tag = _varint(field.number << 3 | 2)
        yield tag + _varint(1000)  # and then nothing
        yield tag + b"\x05\x0a\x03\xed\xa0\x80"  # in it a text with a surrogate, which UTF-8 does not have
    yield b"".join(_varint(field.number << 3 | 2) + b"\x00" for field in kind.DESCRIPTOR.fields)  # all of a oneof


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


class _EndedByServer(Exception):
    """The server has ended the stream with a status."""


class _ServedPeer:
    """The server's side of a stream whose client says these messages and leaves."""

    def __init__(self, messages: tuple[Any, ...]) -> None:
        self._messages = messages

    async def accept(self) -> None: ...

    async def send(self, _message: Any) -> None: ...

    async def send_all(self, take: Callable[[], Awaitable[Any]]) -> None:
        while True:
            await take()

    async def receive_all(self, receive: Callable[[Any], None]) -> None:
        for message in self._messages:
            receive(message)

    async def end(self, code: StatusCode, details: str) -> NoReturn:
        raise _EndedByServer(f"{code.name}: {details}")


async def serve(server: Sessions[Any, Any, Any], *messages: Any, peer: Any = None) -> None:
    """One stream of a peer that says these messages and leaves. Raises what the handler raises."""
    with suppress(_EndedByServer):
        await server.serve(_ServedPeer(messages), peer)


def receive(client: Link[Any, Any], message: Any) -> None:
    """A message of the server that this client is connected to."""
    with suppress(EndStream, ImpossibleTerm):  # then the client connects again
        handle(message, client.receive, client.failed)
