"""Renders chat templates in a process that can be killed at any time: a fork of `render_forks`.

A template may loop for ever in jinja2 or in one call into C, which Python can't interrupt, and it may use too much
memory. So the kernel limits both: it kills the process when one rendering has used its CPU time, and gives it no more
memory than its share. The process reads jobs from a socket, answers there, and ends when it closes.

A job is three parts, each behind its length in four bytes: the template's digest, the template as JSON (empty when
this process has had it), and a JSON list of what to render it with. Each of these gets an answer, behind its length
too. The first byte of an answer says what follows. An element may also ask whether the template reads a variable.
If the third part is empty, the answer is the template's metered code, to be rendered elsewhere.
"""

import signal
import socket
from typing import Any

import orjson

from motet.chat_environment import reads
from motet_gateway.tokens.chat_template import CannotRender, ChatTemplate
from motet_gateway.tokens.metered_template import metered_code

DONE, REFUSED, BROKEN, NO_MEMORY = b"+", b"-", b"!", b"m"
YES = "yes"
"""Answers a question. No is empty."""
OUT_OF_TIME = signal.SIGPROF
LENGTH_BYTES = 4
TOGETHER_BYTES = 64 * 1024
"""Answers up to this size in all are sent in one write, and read in one."""


def serve(link: socket.socket, cpu_seconds: float, *, together: bool = False) -> None:
    """`together`: the time is for all that a job renders, so that others get their turn soon."""
    templates: dict[bytes, ChatTemplate | bytes] = {}
    while True:
        try:
            digest, declared, contexts = bytes(_receive(link)), _receive(link), _receive(link)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answers = []
        try:
            if not contexts:
                answers.append(_framed(*_metered_code(declared)))
            elif declared:
                templates[digest] = _compiled(declared)
            for context in orjson.loads(contexts or b"[]"):
                if not together:
                    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
                answers.append(_framed(*_rendered(templates[digest], context)))
        except (MemoryError, orjson.JSONDecodeError):
            # With too little memory orjson reports invalid JSON. The state of this process may be broken now, so
            # another process gets the other jobs.
            _send(link, [*answers, _framed(NO_MEMORY)])
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(link, answers)


def _compiled(declared: bytearray) -> ChatTemplate | bytes:
    said = orjson.loads(declared)
    try:
        return ChatTemplate.from_text(said["text"], said["special_tokens"])
    except ValueError as error:
        return str(error).encode(errors="replace")


def _metered_code(declared: bytearray) -> tuple[bytes, bytes]:
    try:
        return DONE, metered_code(orjson.loads(declared)["text"])
    except ValueError as error:
        return BROKEN, str(error).encode(errors="replace")


def _rendered(template: ChatTemplate | bytes, context: dict[str, Any]) -> tuple[bytes, bytes]:
    if isinstance(template, bytes):
        return BROKEN, template
    if (name := context.get("reads")) is not None:
        return DONE, YES.encode() if reads(template.text, name) else b""
    try:
        return DONE, template.render(**context).encode(errors="replace")
    except CannotRender as error:
        return REFUSED, orjson.dumps([error.why.encode(errors="replace").decode(), error.field])


def _framed(kind: bytes, content: bytes = b"") -> bytes:
    return (len(kind) + len(content)).to_bytes(LENGTH_BYTES, "big") + kind + content


def _send(link: socket.socket, answers: list[bytes]) -> None:
    together = sum(map(len, answers)) <= TOGETHER_BYTES  # there may be no memory to join large ones
    for part in [b"".join(answers)] if together else answers:
        link.sendall(part)


def _receive(link: socket.socket) -> bytearray:
    return _exactly(link, int.from_bytes(_exactly(link, LENGTH_BYTES), "big"))


def _exactly(link: socket.socket, size: int) -> bytearray:
    buffer = bytearray(size)
    view, at = memoryview(buffer), 0
    while at < size:
        got = link.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return buffer
