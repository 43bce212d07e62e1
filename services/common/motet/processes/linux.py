"""What the kernel says about processes. The kernel uses a pid again, so a process is named by pid and start time."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Names one process. No other process has the same pid and start time until the machine boots again."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Stat:
    identity: ProcessIdentity
    state: str
    parent: int
    session: int

    @property
    def dead(self) -> bool:
        """Whether the process has ended. A zombie has ended, too: its parent has not waited for it yet."""
        return self.state in "ZXx"


def read_stat(pid: int) -> Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may contain any character, also parentheses. So count from the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(
        ProcessIdentity(pid, int(fields[19])), state=fields[0].decode(), parent=int(fields[1]), session=int(fields[3])
    )


def identity_of(pid: int) -> ProcessIdentity | None:
    stat = read_stat(pid)
    return stat.identity if stat is not None and not stat.dead else None


def is_alive(identity: ProcessIdentity) -> bool:
    return identity_of(identity.pid) == identity


def is_stopped(identity: ProcessIdentity) -> bool:
    """Whether SIGSTOP has stopped the process. A debugger stops it in another way."""
    stat = read_stat(identity.pid)
    return stat is not None and stat.identity == identity and stat.state == "T"


def boot_id() -> str:
    """The id of this boot. Start times count from the boot, so records of another boot are of no use."""
    with suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def all_stats() -> Iterator[Stat]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (stat := read_stat(int(entry.name))) is not None:
            yield stat


def open_pidfd(identity: ProcessIdentity) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it has ended. The caller closes it."""
    if identity.pid <= 0:
        return None
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    if is_alive(identity):  # checked after opening, so the descriptor is of this process and no other
        return descriptor
    os.close(descriptor)
    return None


def send(identity: ProcessIdentity, signum: signal.Signals) -> bool:
    """Send a signal to exactly this process. False if it has ended."""
    descriptor = open_pidfd(identity)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def session_members(leader: ProcessIdentity) -> list[ProcessIdentity]:
    """The living processes of the session that `leader` started, with the leader. It works also after the leader ended.

    The kernel gives the session's number to no other process while a member lives. So if the number belongs to another
    process now, the session is over.
    """
    if leader.pid <= 0:
        return []  # 0 is the session of threads of the kernel, and of processes outside of our container
    holder = read_stat(leader.pid)
    if holder is not None and holder.identity != leader:
        return []
    return [stat.identity for stat in all_stats() if stat.session == leader.pid and not stat.dead]


def kill_session(leader: ProcessIdentity) -> None:
    for member in session_members(leader):
        send(member, signal.SIGKILL)


def environment_of(pid: int) -> dict[str, str]:
    """The environment of a process at its start; empty if it has ended or we may not read it."""
    try:
        content = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in content.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def session_leaders_with(name: str, value: str) -> list[ProcessIdentity]:
    """The living processes that started a session and had `name=value` in their environment at their start."""
    return [
        stat.identity
        for stat in all_stats()
        if stat.session == stat.identity.pid and not stat.dead and environment_of(stat.session).get(name) == value
    ]


def become_subreaper() -> None:
    """Orphans among our descendants become our children. Otherwise init gets them, which in a container may never wait
    for them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def reap_orphans(own: set[int]) -> None:
    """Wait for ended children, except those in `own`: other code waits for them."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in own:
                return  # its process manager will wait for it; the next call gets the others
            with suppress(ChildProcessError):
                os.waitpid(ended.si_pid, 0)
