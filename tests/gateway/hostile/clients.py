"""Clients that mean harm and have no key, or the key of another tenant: each sends raw bytes until its time is over."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

HOST = b"host: localhost\r\n"
GET = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"content-type: application/json\r\n"
BODY = b'{"model":"tiny","prompt":"x","max_tokens":4}'


class Target:
    """A gateway, and the key to send to it."""

    def __init__(self, port: int, key: str = "") -> None:
        self.port = port
        self.key = b"authorization: Bearer %s\r\n" % key.encode() if key else b""

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def send(self, data: bytes, *, read: bool = True, seconds: float = 1.0) -> bytes:
        """Send `data` on a new connection, and read what comes within `seconds` or until the end."""
        with contextlib.suppress(OSError, TimeoutError):
            async with self.connected() as (reader, writer), asyncio.timeout(seconds):
                writer.write(data)
                await writer.drain()
                return await reader.read(1 << 20) if read else await asyncio.Future()
        return b""

    def request(self, body: bytes = BODY, *more: bytes) -> bytes:
        return POST + self.key + b"".join(more) + b"content-length: %d\r\n\r\n" % len(body) + body


Client = Callable[[Target, random.Random], Awaitable[object]]


async def long_pipeline(target: Target, _: random.Random) -> None:
    await target.send((GET if not target.key else target.request()) * 12_000)


async def bare_pipeline(target: Target, _: random.Random) -> None:
    """The shortest requests there are, without a Host."""
    await target.send(b"GET / HTTP/1.1\r\n\r\n" * 60_000)


async def upgrades(target: Target, _: random.Random) -> None:
    head = POST + target.key + b"connection: upgrade\r\nupgrade: x\r\n"
    await target.send((head + b"content-length: %d\r\n\r\n" % len(GET) + GET) * 2000)


async def half_head(target: Target, drawn: random.Random) -> None:
    await target.send(target.request()[: drawn.randrange(1, len(POST))], read=False)


async def large_head(target: Target, _: random.Random) -> None:
    await target.send(POST + b"".join(b"x-%d: %s\r\n" % (i, b"a" * 300) for i in range(2000)))


async def slow_body(target: Target, _: random.Random) -> None:
    with contextlib.suppress(OSError):
        async with target.connected() as (_reader, writer):
            writer.write(POST + target.key + b"content-length: 1000\r\n\r\n")
            for _ in range(20):
                writer.write(b" ")
                await asyncio.sleep(0.05)


async def tiny_chunks(target: Target, _: random.Random) -> None:
    await target.send(POST + target.key + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 200_000)


async def long_extension(target: Target, _: random.Random) -> None:
    await target.send(POST + target.key + b"transfer-encoding: chunked\r\n\r\n5;" + b"a" * 2_000_000)


async def empty_lines(target: Target, _: random.Random) -> None:
    await target.send(b"\r\n" * 1_000_000)


async def trailers(target: Target, _: random.Random) -> None:
    await target.send(POST + target.key + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x: y\r\n" * 300_000)


async def oversized(target: Target, _: random.Random) -> None:
    await target.send(POST + target.key + b"content-length: 1000000000\r\n\r\n" + bytes(8 << 20))


async def many_connections(target: Target, _: random.Random) -> None:
    await asyncio.gather(*(target.send(GET[: i % len(GET)], read=False, seconds=0.5) for i in range(200)))


async def unread_answers(target: Target, _: random.Random) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        async with target.connected() as (_reader, writer), asyncio.timeout(1):
            while True:
                writer.write(GET * 16)
                await writer.drain()
                await asyncio.sleep(0.01)


async def mutated(target: Target, drawn: random.Random) -> None:
    """A valid request with some bytes removed, doubled or changed, in random parts."""
    data = bytearray(target.request() * drawn.randint(1, 3))
    for _ in range(drawn.randint(1, 8)):
        at = drawn.randrange(len(data))
        how = drawn.randrange(4)
        if how == 0:
            del data[at : at + drawn.randint(1, 20)]
        elif how == 1:
            data[at:at] = data[at : at + drawn.randint(1, 50)] * drawn.randint(1, 50)
        elif how == 2:
            data[at] = drawn.randrange(256)
        else:
            data[at:at] = drawn.choice([b"\r\n", b"\n", b"\x00", b" ", b":", b"transfer-encoding: chunked\r\n", GET])
        if not data:
            return
    with contextlib.suppress(OSError, TimeoutError):
        async with target.connected() as (reader, writer), asyncio.timeout(1):
            while data:
                size = drawn.randint(1, len(data))
                writer.write(bytes(data[:size]))
                del data[:size]
                await asyncio.sleep(0)
            await reader.read(1 << 16)


CLIENTS: dict[str, Client] = {
    client.__name__: client
    for client in (
        long_pipeline, bare_pipeline, upgrades, half_head, large_head, slow_body, tiny_chunks, long_extension,
        empty_lines, trailers, oversized, many_connections, unread_answers, mutated,
    )
}  # fmt: skip
