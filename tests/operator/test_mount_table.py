"""Which volume a folder seems to lie on."""

import os
from pathlib import Path

import pytest

from motet_operator.local import mount_table
from motet_operator.local.mount_table import MountTable, read_mounts

TEXT = rb"""22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/x rw
30 22 0:52 / /mnt/a rw shared:2 - nfs4 server:/ rw
31 22 0:53 / /mnt/a rw - nfs4 server:/over rw
32 22 0:54 / /mnt/a/b\040c\134d rw - nfs4 server:/ rw
broken
33 22 x:1 / /mnt/e rw - nfs4 server:/ rw
"""


@pytest.mark.parametrize(
    ("folder", "device"),
    [
        ("/", (259, 2)),
        ("/mnt", (259, 2)),
        ("/mnt/ab", (259, 2)),
        ("/mnt/a", (0, 53)),
        ("/mnt/a/b", (0, 53)),
        ("/mnt/a/b c\\d/e", (0, 54)),
        ("/mnt/a/../x", (259, 2)),
        ("/mnt/e/x", (259, 2)),
    ],
)
def test_the_nearest_mount_point_above_counts(folder: str, device: tuple[int, int]) -> None:
    assert MountTable(TEXT).device_of(Path(folder)) == os.makedev(*device)


@pytest.mark.parametrize("folder", ["/x", "x", ".", "/"])
def test_without_mounts_nothing_is_known(folder: str) -> None:
    assert MountTable(b"").device_of(Path(folder)) == 0


def test_this_machine_names_the_volume_of_its_mounts() -> None:
    assert MountTable(read_mounts()).device_of(Path("/proc/self")) == Path("/proc").stat().st_dev


def test_a_list_that_is_too_long_is_not_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount_table, "MAX_MOUNT_BYTES", 10)
    assert read_mounts() == b""
