"""`python -m motet_gateway.tokens.render_forks CPU_SECONDS MEMORY_BYTES`: forks the processes that render templates.

A fork is there in milliseconds and shares the memory of what it imports; a new Python takes a tenth of a second and
25 MB. No template is ever read here but one of our own, so a fork finds nothing of another one.

Orders come through the socket at descriptor 0: to start a fork, with the socket through which it is to serve, or to end
one. It answers there which one it has started, in the order of the orders, and with which status each has ended. The
forks end with it, and it ends when the socket closes.
"""

import gc
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import NoReturn

from motet.confined import confine, end_with_parent
from motet_gateway.tokens.chat_template import ChatTemplate
from motet_gateway.tokens.render_process import serve

ORDER = struct.Struct("!ci")
"""One of the next three, and for END which fork"""
START, START_TOGETHER, END = b"s", b"t", b"e"
"""START_TOGETHER: see `serve`."""
SAID = struct.Struct("!cii")
"""One of the next three, the fork, and its exit status or the number of the error"""
STARTED, NOT_STARTED, ENDED = b"s", b"n", b"e"


def fork_as_ordered(orders: socket.socket, cpu_seconds: float, memory_bytes: int) -> None:
    here, forks = os.getpid(), set[int]()
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([orders, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _tell_who_ended(orders, forks)
        if orders not in ready:
            continue
        order, links, _, _ = socket.recv_fds(orders, ORDER.size, 1)
        if not order:
            break
        what, which = ORDER.unpack(order)
        if what == END:
            if which in forks:  # its number is nobody else's before it has been waited for
                os.kill(which, signal.SIGKILL)
            continue
        with socket.socket(fileno=links[0]) as link:
            try:
                fork = os.fork()
            except OSError as error:
                orders.sendall(SAID.pack(NOT_STARTED, 0, error.errno or 0))
                continue
            if not fork:
                signal.set_wakeup_fd(-1)
                for one in (orders, woken, wakes):
                    one.close()
                _render(link, here, cpu_seconds, memory_bytes, together=what == START_TOGETHER)
            forks.add(fork)
            orders.sendall(SAID.pack(STARTED, fork, 0))
    for fork in forks:
        os.kill(fork, signal.SIGKILL)


def _tell_who_ended(orders: socket.socket, forks: set[int]) -> None:
    for fork in list(forks):
        ended, status = os.waitpid(fork, os.WNOHANG)
        if ended:
            forks.remove(fork)
            orders.sendall(SAID.pack(ENDED, fork, os.waitstatus_to_exitcode(status)))


def _render(link: socket.socket, parent: int, cpu_seconds: float, memory_bytes: int, *, together: bool) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        confine(memory_bytes, parent=parent)
        serve(link, cpu_seconds, together=together)
        status = 0
    finally:
        os._exit(status)


def main() -> None:
    cpu_seconds, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ChatTemplate.from_text("{{ 1 }}", {})  # makes what every template needs
    gc.collect()
    gc.freeze()  # a fork's collector leaves this memory shared
    with suppress(ConnectionError):  # the gateway has ended
        fork_as_ordered(socket.socket(fileno=0), cpu_seconds, memory_bytes)


if __name__ == "__main__":
    main()
