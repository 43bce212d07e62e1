"""Says on which volume a folder lies, from the system's list of mounts: nothing on the volume is touched, which may
hang."""

import os
import re
from pathlib import Path

MAX_MOUNT_BYTES = 1 << 20
"""Of a longer list nothing is known."""

_ESCAPED = re.compile(rb"\\([0-7]{3})")


class MountTable:
    def __init__(self, text: bytes) -> None:
        """`text`: in the form of /proc/self/mountinfo"""
        self.text = text
        self._devices: dict[str, int] = {}
        """By the mount point. What is mounted over another one comes later."""
        for line in text.splitlines():
            match line.split(b" ", 5):
                case [_, _, device, _, point, *_]:
                    major, _, minor = device.partition(b":")
                    if major.isdigit() and minor.isdigit():
                        self._devices[os.fsdecode(_ESCAPED.sub(_byte, point))] = os.makedev(int(major), int(minor))

    def device_of(self, folder: Path) -> int:
        """The device of the mount point that is nearest above the folder; 0 if it is not known. Symbolic links are not
        followed."""
        path = os.path.normpath(folder)
        while path not in self._devices:
            above = os.path.dirname(path)  # noqa: PTH120 - paths of text are several times faster
            if above == path or not above:
                return 0
            path = above
        return self._devices[path]


def read_mounts() -> bytes:
    """The list of mounts; empty if the system has none."""
    try:
        with Path("/proc/self/mountinfo").open("rb") as file:
            text = file.read(MAX_MOUNT_BYTES + 1)
    except OSError:
        return b""
    return text if len(text) <= MAX_MOUNT_BYTES else b""


def _byte(escaped: re.Match[bytes]) -> bytes:
    return bytes([int(escaped[1], 8) & 0xFF])
