"""Becomes a container: `python -I -S sandbox.py <spec.json> <pipe>`. The kubelet starts it for each container run.

It has its own mounts, processes, host name and IPC, in the network of its pod. The root is an overlay of this machine's
root. /root, /home, /tmp and others are empty there; only the interpreter and the checkout are mounted in them. So no
other process sees what a container writes, and a user without access to a home folder can run an interpreter there. The
first process has number 1: it receives only signals that it handles, and all other processes end with it.

It imports only a little of the standard library (not even pathlib), since every container needs time for the imports.
It writes `pid <n>` to the pipe, and then an error if the command cannot be executed. It ends with the container's exit
status (128 + signal).
"""

import ctypes
import json
import os
import signal
import socket
import sys

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 32, 4096, 8192, 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
EMPTY = {"root": 0o755, "home": 0o755, "tmp": 0o1777, "run": 0o755, "mnt": 0o755, "srv": 0o755, "var/tmp": 0o1777}
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# The capabilities that container runtimes leave to root by default.
DEFAULT_CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
    "NET_BIND_SERVICE": 10, "NET_RAW": 13, "SYS_CHROOT": 18, "MKNOD": 27, "AUDIT_WRITE": 29, "SETFCAP": 31,
}  # fmt: skip
OTHER_CAPABILITIES = {"NET_ADMIN": 12, "IPC_LOCK": 14, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_NICE": 23}

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    done = libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    check(done, f"mount {source} at {target}")


def bind(source: str, target: str, *, readonly: bool) -> None:
    mount(source, target, flags=MS_BIND | MS_REC)
    if readonly:
        mount("", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def inside(root: str, path: str) -> str:
    """Resolve `path` below another root: absolute symbolic links begin at that root."""
    parts, at, hops = path.strip("/").split("/"), root, 0
    while parts:
        part = parts.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            at = root if at == root else os.path.dirname(at)
            continue
        step = os.path.join(at, part)
        if os.path.islink(step) and hops < 40:
            hops += 1
            link = os.readlink(step)
            at = root if link.startswith("/") else at
            parts = link.strip("/").split("/") + parts
            continue
        at = step
    return at


def place(root: str, path: str, *, like: str) -> str:
    """A mount point for `like`. It is created in the overlay if it is missing."""
    target = inside(root, path)
    if os.path.isdir(like):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "a"):
            pass
    return target


def same(one: str, other: str) -> bool:
    return os.path.exists(other) and os.path.samefile(one, other)


def build_root(spec: dict) -> str:
    layers, root = spec["layers"], os.path.join(spec["layers"], "root")
    upper, work = os.path.join(layers, "upper"), os.path.join(layers, "work")
    for folder in (upper, work, root):
        os.makedirs(folder)
    for name, mode in EMPTY.items():
        folder = os.path.join(upper, name)
        os.makedirs(folder)
        os.chmod(folder, mode)
        os.setxattr(folder, "trusted.overlay.opaque", b"y")
    mount("overlay", root, "overlay", data=f"lowerdir=/,upperdir={upper},workdir={work}")
    for path in spec["keep"]:
        bind(path, place(root, path, like=path), readonly=True)
    devices = place(root, "/dev", like="/dev")
    mount("tmpfs", devices, "tmpfs", MS_NOSUID, "mode=755")
    for name in [*DEVICES, *spec["devices"]]:
        bind(f"/dev/{name}", place(root, f"/dev/{name}", like=f"/dev/{name}"), readonly=False)
    for name, link in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(link, os.path.join(devices, name))
    os.mkdir(os.path.join(devices, "shm"))
    mount("shm", os.path.join(devices, "shm"), "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777,size=64m")
    bind("/sys", place(root, "/sys", like="/sys"), readonly=True)
    for one in sorted(spec["mounts"], key=lambda each: each["target"].count("/")):
        bind(one["source"], place(root, one["target"], like=one["source"]), readonly=one["readonly"])
    for path in spec["keep"]:
        if not same(path, inside(root, path)):  # such as a checkout in /tmp, if the pod has a volume there
            bind(path, place(root, path, like=path), readonly=True)
    for path, source in spec["over"].items():  # of the same name, in a folder that does not have it
        folder, more = os.path.dirname(path), os.path.dirname(source)
        mount("overlay", inside(root, folder), "overlay", MS_RDONLY, f"lowerdir={more}:{folder}")
        bind(source, inside(root, path), readonly=False)
    os.makedirs(inside(root, spec["cwd"]), exist_ok=True)
    with open(inside(root, "/etc/passwd"), "a") as passwords:
        passwords.writelines(f"{name}:x:{user}:{user}::/tmp:/usr/sbin/nologin\n" for name, user in spec["users"])
    place(root, "/proc", like="/proc")
    if spec["readonly"]:
        mount("", root, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)
    return root


def become_container(spec: dict, root: str) -> None:
    """Returns only with an error."""
    os.chdir(root)
    mount(".", "/", flags=MS_MOVE)
    os.chroot(".")
    os.chdir("/")
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    socket.sethostname(spec["hostname"])
    os.setsid()
    if not spec["privileged"]:
        known = {**DEFAULT_CAPABILITIES, **OTHER_CAPABILITIES}
        kept = set() if "ALL" in spec["drop"] else set(DEFAULT_CAPABILITIES) - set(spec["drop"])
        numbers = {known[name] for name in kept | set(spec["add"]) if name in known}
        for number in range(64):
            if number not in numbers:
                libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    os.setgroups(spec["groups"])
    os.setresgid(spec["gid"], spec["gid"], spec["gid"])
    os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # set it again: a change of user clears it
    if spec["no_new_privileges"]:
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.umask(0o022)
    os.chdir(spec["cwd"])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # the interpreter ignores them
    os.execvpe(spec["argv"][0], spec["argv"], spec["env"])


def main() -> None:
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    pipe = int(sys.argv[2])
    os.set_inheritable(pipe, False)  # executing the command closes it, which tells the kubelet that it started
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        if spec["network"] is not None:
            check(libc.setns(spec["network"], CLONE_NEWNET), "setns")
            os.close(spec["network"])
        check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID), "unshare")
        mount("", "/", flags=MS_REC | MS_PRIVATE)
        root = build_root(spec)
        child = os.fork()
        if child == 0:
            become_container(spec, root)
    except OSError as error:
        os.write(pipe, f"error {error}".encode())
        os._exit(128)
    os.write(pipe, f"pid {child}\n".encode())
    os.close(pipe)
    _, status = os.waitpid(child, 0)
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
