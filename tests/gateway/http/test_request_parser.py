"""What the bytes of a client are taken for, whatever parts they arrive in, beside a second reader (h11)."""

import time

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_gateway.http.request_parser import Event, Mark, Refusal, RequestHead, RequestParser

MAX_BYTES, MAX_FIELDS = 2000, 20

GET = b"GET /a?b=c HTTP/1.1\r\nhost: h\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /c HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nt: 1\r\n\r\n"
)
HEAD = b"POST /x HTTP/1.1\r\nhost: h\r\n"
UPGRADE = b"connection: keep-alive, Upgrade\r\nupgrade: h2c\r\n"


def parser() -> RequestParser:
    return RequestParser(max_head_bytes=MAX_BYTES, max_fields=MAX_FIELDS)


def events(*pieces: bytes, room: int = 100) -> list[Event]:
    one = parser()
    found: list[Event] = []
    for piece in pieces:
        for event in one.feed(piece, room):
            room -= isinstance(event, RequestHead)
            if isinstance(event, bytes) and found and isinstance(found[-1], bytes):
                found[-1] += event
            else:
                found.append(event)
    return found


def parts(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def seen(found: list[Event]) -> list[object]:
    """Errors are never equal, and which of two is found first depends on the parts."""
    return [event.error.code if isinstance(event, Refusal) else event for event in found]


def bodies(found: list[Event]) -> list[tuple[str, bytes]]:
    """Path and body of each complete request."""
    whole, path, body = [], "", b""
    for event in found:
        if isinstance(event, RequestHead):
            path, body = event.path, b""
        elif isinstance(event, bytes):
            body += event
        elif event is Mark.END_OF_REQUEST:
            whole.append((path, body))
    return whole


def refusal(found: list[Event]) -> str:
    return found[-1].error.message if found and isinstance(found[-1], Refusal) else ""


# ------------------------------------------------------------------------------------------------------------- requests


def test_requests_and_their_bodies_are_found() -> None:
    found = events(GET + POST + CHUNKED + GET)
    assert bodies(found) == [("/a", b""), ("/p", b"hello"), ("/c", b"hello"), ("/a", b"")]
    head = found[0]
    assert isinstance(head, RequestHead)
    assert (head.method, head.raw_path, head.query, head.version) == ("GET", b"/a", b"b=c", "1.1")
    assert head.headers == [(b"host", b"h")]


def test_trailers_are_headers_of_no_request() -> None:
    heads = [event for event in events(CHUNKED + GET) if isinstance(event, RequestHead)]
    assert [b"t" in dict(head.headers) for head in heads] == [False, False]


@pytest.mark.parametrize("last", [b"connection: close\r\n", b"connection: close, upgrade\r\nupgrade: x\r\n"])
def test_nothing_behind_a_last_request_is_read(last: bytes) -> None:
    assert bodies(events(HEAD + last + b"\r\n" + GET)) == [("/x", b"")]
    assert bodies(events(b"GET /old HTTP/1.0\r\n\r\n" + GET)) == [("/old", b"")]


# ------------------------------------------------------------------------------------------------------------- upgrades


@pytest.mark.parametrize("size", [1, 3, 10, 1000])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"", b""),
        (b"content-length: 0\r\n", b""),
        (b"content-length: %d\r\n" % len(GET), GET),
        (b"transfer-encoding: chunked\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(GET), GET)),
    ],
)
def test_a_request_that_asks_for_an_upgrade_is_read_as_if_it_did_not(framing: bytes, body: bytes, size: int) -> None:
    """Its body is a request: read as one, it would be a request that no proxy in between has seen."""
    found = events(*parts((HEAD + UPGRADE + framing + b"\r\n" + body + POST) * 3, size))
    assert bodies(found) == [("/x", GET if body else b""), ("/p", b"hello")] * 3


def test_a_head_near_the_limit_may_ask_for_an_upgrade() -> None:
    padding = b"x: %s\r\n" % (b"y" * (MAX_BYTES - 120))
    assert bodies(events(HEAD + UPGRADE + padding + b"content-length: 5\r\n\r\nhello")) == [("/x", b"hello")]


# -------------------------------------------------------------------------------------------------------------- bounds


def test_no_more_requests_begin_than_there_is_room_for() -> None:
    found = events(GET * 1000, room=16)
    assert len(bodies(found)) == 16
    assert found[-1] is Mark.TOO_MANY


@pytest.mark.parametrize("size", [1, 7, 500, 1 << 20])
@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * 5000,
        b"GET / HTTP/1.1\r\nx: " + b"a" * 5000,
        b"GET / HTTP/1.1\r\n" + b"a" * 5000,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 21 + b"z",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5;" + b"a" * 5000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: " + b"a" * 5000,
        b"\r\n" * 3000,
    ],
    ids=["target", "value", "name", "fields", "chunk extension", "trailer", "empty lines"],
)
def test_what_has_no_end_is_refused(data: bytes, size: int) -> None:
    assert "more than" in refusal(events(*parts(data, size)))


@pytest.mark.parametrize(
    "piece", [GET, CHUNKED, b"\r\n", b"POST / HTTP/1.1\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"]
)
def test_any_read_takes_linear_time(piece: bytes) -> None:
    def seconds(count: int) -> float:
        data = piece * count
        began = time.process_time()
        parser().feed(data, 16)
        return time.process_time() - began

    assert seconds(20_000) < 40 * seconds(2_000) + 0.05


def test_a_body_in_tiny_chunks_is_one_piece_for_each_read() -> None:
    body = b"1\r\na\r\n" * 10_000 + b"0\r\n\r\n"
    found = RequestParser(max_head_bytes=1 << 20, max_fields=9).feed(
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + body, 1
    )
    assert [type(event) for event in found] == [RequestHead, bytes, Mark]


# ------------------------------------------------------------------------------------------------------------- framing


WRONG = {
    "two lengths": HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "one length twice": HEAD + b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello",
    "a list of lengths": HEAD + b"content-length: 5, 5\r\n\r\nhello",
    "a length and a coding": HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a coding and a length": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    **{
        f"the length {value!r}": HEAD + b"content-length: " + value + b"\r\n\r\nhello"
        for value in (b"-5", b"+5", b"0x5", b"5 5", b"", b"five", b"5.0", b"9" * 30)
    },
    **{
        f"the coding {value!r}": HEAD + b"transfer-encoding: " + value + b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
        for value in (
            b"identity", b"xchunked", b"chunked, identity", b"identity, chunked", b"gzip, chunked", b"chunked, chunked",
            b"chunked;q=1", b'"chunked"', b"\x0bchunked", b"", b",chunked", b"chunked,",
        )
    },
    "a coding twice": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a coding in 1.0": b"POST /x HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a bare LF after a header": b"GET / HTTP/1.1\r\nhost: h\nx: y\r\n\r\n",
    "a bare LF after the request line": b"GET / HTTP/1.1\nhost: h\r\n\r\n",
    "a bare LF after the head": b"GET / HTTP/1.1\r\nhost: h\r\n\n",
    "a bare CR in a value": b"GET / HTTP/1.1\r\nhost: h\rx: y\r\n\r\n",
    "a bare CR after the head": b"GET / HTTP/1.1\r\nhost: h\r\n\rGET / HTTP/1.1\r\n\r\n",
    "a folded line": b"GET / HTTP/1.1\r\nhost: h\r\nx: y\r\n z\r\n\r\n",
    "a folded first line": b"GET / HTTP/1.1\r\n x: y\r\nhost: h\r\n\r\n",
    "a space before a colon": HEAD + b"content-length : 5\r\n\r\nhello",
    "NUL in a value": HEAD + b"x: a\x00b\r\n\r\n",
    "a control character in a value": HEAD + b"x: a\x01b\r\n\r\n",
    "a name that is not ASCII": HEAD + b"x\xff: y\r\n\r\n",
    "no name": HEAD + b": y\r\n\r\n",
    "no colon": HEAD + b"abc\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "version 2.0": b"GET / HTTP/2.0\r\nhost: h\r\n\r\n",
    "version 0.9": b"GET / HTTP/0.9\r\nhost: h\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "a space after the version": b"GET / HTTP/1.1 \r\nhost: h\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nhost: h\r\n\r\n",
    "a tab after the method": b"GET\t/ HTTP/1.1\r\nhost: h\r\n\r\n",
    "a space before the method": b" GET / HTTP/1.1\r\nhost: h\r\n\r\n",
    "a target that is not ASCII": b"GET /\xff HTTP/1.1\r\nhost: h\r\n\r\n",
    "CONNECT": b"CONNECT h:443 HTTP/1.1\r\nhost: h:443\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    **{
        f"the chunk {chunk!r}": HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n"
        for chunk in (
            b"5\nhello\r\n", b"5\r\nhello\n", b"5\r\nhelloXX", b"0x5\r\nhello\r\n", b"5 \r\nhello\r\n", b"\r\n",
            b"-1\r\n", b"5;a\nhello\r\n",
            b"5;a\rX\r\nhello\r\n", b'5;a="\n"\r\nhello\r\n', b"F" * 17 + b"\r\nhello\r\n",
        )
    },
    "a length in a trailer": HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\ncontent-length: 5\r\n\r\nhello",
    "a coding in a trailer": HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\ntransfer-encoding: chunked\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_what_two_readers_could_read_differently_is_refused(data: bytes, size: int) -> None:
    found = events(*parts(data + GET, size))
    assert refusal(found)
    assert bodies(found) == []


ACCEPTED = {
    "empty lines before a request (RFC 9112, 2.2)": b"\r\n\r\n" + GET,
    "several spaces in the request line (RFC 9112, 3)": b"GET  /  HTTP/1.1\r\nhost: h\r\n\r\n",
    "zeros before the size of a chunk": HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"0" * 30 + b"\r\n\r\n",
    "RTSP, whose request line is like one of HTTP/1.0": b"OPTIONS /x RTSP/1.0\r\nhost: h\r\n\r\n",
}
"""What h11 refuses and we do not. Each is one request for every reader that takes it at all."""


@pytest.mark.parametrize("data", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_only_h11_refuses_is_one_request(data: bytes) -> None:
    assert h11_bodies(data) is None
    assert len(bodies(events(data))) == 1


def h11_bodies(data: bytes) -> list[bytes] | None:
    """The bodies of the complete requests in `data`. None: h11 refuses something of it."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=100_000)
    found, body = [], b""
    if data:  # none would be the end of the connection
        connection.receive_data(data)
    try:
        while True:
            event = connection.next_event()
            if event in (h11.NEED_DATA, h11.PAUSED):
                return found
            if isinstance(event, h11.Data):
                body += bytes(event.data)
            if isinstance(event, h11.EndOfMessage):
                found.append(body)
                body = b""
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return found
                connection.start_next_cycle()
    except h11.RemoteProtocolError:
        return None


pieces_of_heads = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\n", b"POST /x HTTP/1.1\r\n", b"POST /x HTTP/1.0\r\n", b"host: h\r\n",
        b"content-length: 5\r\n", b"content-length: 3\r\n", b"Content-Length:5\r\n", b"x: y\r\n",
        b"transfer-encoding: chunked\r\n", b"Transfer-Encoding:\tchunked \r\n", b"transfer-encoding: identity\r\n",
        b"connection: upgrade\r\nupgrade: h2c\r\n", b"connection: close\r\n",
        b"x : y\r\n", b" z\r\n", b"x: y\n", b"\r\n", b"\n", b"\r", b"hello", b"5\r\nhello\r\n", b"3;a=b\r\nhel\r\n",
        b"0\r\n\r\n", b"0\r\nt: 1\r\n\r\n", b"\x00", b"expect: 100-continue\r\n", GET, POST, CHUNKED,
    ]
)  # fmt: skip
streams = st.lists(pieces_of_heads, max_size=12).map(b"".join) | st.lists(
    st.sampled_from([GET, POST, CHUNKED, HEAD + UPGRADE + b"content-length: 5\r\n\r\nhello"]), max_size=6
).map(b"".join)


@given(streams, st.data())
def test_any_parts_of_any_bytes_are_the_same_requests(data: bytes, draw: st.DataObject) -> None:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=20)))
    pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    whole = seen(events(data, room=5))
    assert seen(events(*pieces, room=5)) == whole
    assert seen(events(*parts(data, 1), room=5)) == whole


@given(streams)
def test_what_is_accepted_is_read_as_h11_reads_it(data: bytes) -> None:
    found = events(data)
    if refusal(found):
        return
    while data.startswith((b"\r", b"\n")):
        data = data[1:]
    second = h11_bodies(data)
    if second is not None:
        assert [body for _, body in bodies(found)] == second
