"""What the kernel knows about processes. A pid alone names nobody for long: pid and start time together do."""

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
    """One process, for ever: no other will have the same pid and start time in this boot of the machine."""

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
        """A zombie has ended; only its parent has not looked yet."""
        return self.state in "ZXx"


def read_stat(pid: int) -> Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, so count from the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(
        ProcessIdentity(pid, int(fields[19])), state=fields[0].decode(), parent=int(fields[1]), session=int(fields[3])
    )


def identity_of(pid: int) -> ProcessIdentity | None:
    stat = read_stat(pid)
    return stat.identity if stat is not None and not stat.dead else None


def is_alive(identity: ProcessIdentity) -> bool:
    return identity_of(identity.pid) == identity


def boot_id() -> str:
    """Start times count from boot, so a record of another boot means nothing."""
    with suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return ""


def all_stats() -> Iterator[Stat]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (stat := read_stat(int(entry.name))) is not None:
            yield stat


def open_pidfd(identity: ProcessIdentity) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it has. The caller closes it."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return None
    if is_alive(identity):  # looked at after opening: the descriptor is of this very process
        return descriptor
    os.close(descriptor)
    return None


def send(identity: ProcessIdentity, signum: signal.Signals) -> bool:
    """Signal exactly this process; False if it has ended."""
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
    """The living processes of the session that `leader` began, itself included, also after its death.

    While a member lives the kernel gives nobody else the session's number; so if the number belongs to another process
    by now, the session is over.
    """
    holder = read_stat(leader.pid)
    if holder is not None and holder.identity != leader:
        return []
    return [stat.identity for stat in all_stats() if stat.session == leader.pid and not stat.dead]


def kill_session(leader: ProcessIdentity) -> None:
    for member in session_members(leader):
        send(member, signal.SIGKILL)


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty if it is gone or not ours to read."""
    try:
        content = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in content.split(b"\0") if item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def session_leaders_with(name: str, value: str) -> list[ProcessIdentity]:
    """The living processes that began a session and were started with `name=value` in their environment."""
    return [
        stat.identity
        for stat in all_stats()
        if stat.session == stat.identity.pid and not stat.dead and environment_of(stat.session).get(name) == value
    ]


def become_subreaper() -> None:
    """Orphans below us become our children and not init's: in a container init may never reap them."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def reap_orphans(own: set[int]) -> None:
    """Collect ended children that nobody else waits for. Those in `own` have somebody who does."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in own:
                return  # its keeper is about to collect it; the rest comes with the next call
            with suppress(ChildProcessError):
                os.waitpid(ended.si_pid, 0)
