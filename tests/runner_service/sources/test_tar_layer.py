"""Tars as ModelPacks have them, and tars that want more than one file's place."""

import io
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from motet_runner.sources.tar_layer import MAX_ENTRIES, MAX_HEADER_BYTES, LargerThanLimit, NotOneFile, unpack

NAME = "adapter_model.safetensors"
BODY = os.urandom(3_000_000)
LIMIT = len(BODY)


def tar_at(path: Path, /, *entries: tuple[str, bytes, bytes], form: int = tarfile.PAX_FORMAT, **more: str) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, body, kind in entries:
            entry = tarfile.TarInfo(name)
            entry.size, entry.type, entry.linkname = len(body), kind, "/etc/passwd"
            entry.pax_headers = more
            tar.addfile(entry, io.BytesIO(body))
    return path


@pytest.mark.parametrize("size", [0, 1, 511, 512, 1 << 20, len(BODY)])
def test_a_file_takes_the_place_of_its_tar(tmp_path, size):
    checked: list[int] = []
    path = tar_at(tmp_path / "x.part", (f"./{NAME}", BODY[:size], tarfile.REGTYPE))
    unpack(path, NAME, size, checked.append)
    assert path.read_bytes() == BODY[:size]
    assert sum(checked) == size
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_all_forms_of_tar_are_read_with_folders_beside_the_file(tmp_path, form):
    path = tar_at(tmp_path / "x", ("a", b"", tarfile.DIRTYPE), (NAME, BODY, tarfile.REGTYPE), form=form)
    unpack(path, NAME, LIMIT, lambda _: None)
    assert path.read_bytes() == BODY


FILE = (NAME, b"x" * 2000, tarfile.REGTYPE)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], f"has no file {NAME}"),
        ([("other", b"x", tarfile.REGTYPE)], f"has no file {NAME}"),
        ([(f"../{NAME}", b"x", tarfile.REGTYPE)], f"has no file {NAME}"),
        ([(f"/{NAME}", b"x", tarfile.REGTYPE)], f"has no file {NAME}"),
        ([(f"a/{NAME}", b"x", tarfile.REGTYPE)], f"has no file {NAME}"),
        ([FILE, FILE], "has several files"),
        ([FILE, ("other", b"x", tarfile.REGTYPE)], "has several files"),
        ([(NAME, b"", tarfile.SYMTYPE)], "has a link"),
        ([(NAME, b"", tarfile.LNKTYPE)], "has a link"),
        ([FILE, ("l", b"", tarfile.SYMTYPE)], "has a link"),
        ([(NAME, b"", tarfile.CHRTYPE)], "has a link or another entry"),
        ([(NAME, b"", tarfile.FIFOTYPE)], "has a link or another entry"),
        ([("d", b"", tarfile.DIRTYPE)] * MAX_ENTRIES, "entries or more"),
    ],
)
def test_a_tar_with_other_entries_is_refused_and_stays(tmp_path, entries, words):
    path = tar_at(tmp_path / "x", *entries)
    before = path.read_bytes()
    with pytest.raises(NotOneFile, match=words):
        unpack(path, NAME, LIMIT, lambda _: None)
    assert path.read_bytes() == before


def test_a_sparse_file_is_refused(tmp_path):
    path = tar_at(tmp_path / "x", FILE, **{"GNU.sparse.major": "0", "GNU.sparse.map": "0,100", "GNU.sparse.size": "9"})
    with pytest.raises(NotOneFile, match="another entry that is no file"):
        unpack(path, NAME, LIMIT, lambda _: None)


def test_a_header_that_claims_gigabytes_is_not_read(tmp_path):
    path = tar_at(tmp_path / "x", FILE, comment="x" * (MAX_HEADER_BYTES + 1))
    with pytest.raises(NotOneFile, match="has a header that is too long"):
        unpack(path, NAME, LIMIT, lambda _: None)


@pytest.mark.parametrize("cut", [100, 512, 513, 1000, 2500])
def test_a_tar_that_ends_early_is_refused(tmp_path, cut):
    path = tar_at(tmp_path / "x", FILE)
    with path.open("r+b") as file:
        file.truncate(cut)
    with pytest.raises(NotOneFile):
        unpack(path, NAME, LIMIT, lambda _: None)


def test_headers_without_end_are_refused(tmp_path):
    """Each extended header is followed by one more."""
    header = tarfile.TarInfo("x")
    header.type = tarfile.XHDTYPE
    path = tmp_path / "x"
    path.write_bytes(header.tobuf(tarfile.USTAR_FORMAT) * 20_000)
    with pytest.raises(NotOneFile):
        unpack(path, NAME, LIMIT, lambda _: None)


@pytest.mark.parametrize("size", [b"\xff" * 12, b"\x80" + b"\xff" * 11, b"77777777777\0", b"-0000000001\0", b"9" * 12])
def test_a_size_that_makes_no_sense_is_refused(tmp_path, size):
    path = tar_at(tmp_path / "x", FILE, form=tarfile.USTAR_FORMAT)
    head = bytearray(path.read_bytes())
    head[124:136] = size
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head[:512])
    path.write_bytes(head)
    with pytest.raises(NotOneFile):
        unpack(path, NAME, LIMIT, lambda _: None)
    assert path.stat().st_size == len(head)


def test_a_size_beyond_the_tar_is_refused_before_the_file_grows(tmp_path):
    path = tar_at(tmp_path / "x", FILE, **{"GNU.sparse.realsize": "1900000000"})
    before = path.read_bytes()
    with pytest.raises(NotOneFile, match="another entry that is no file"):
        unpack(path, NAME, 2 << 30, lambda _: None)
    assert path.read_bytes() == before


@pytest.mark.parametrize("key", ["GNU.sparse.name", "SCHILY.realsize", "SUN.holesdata", "linkpath", "anything"])
def test_a_key_that_may_change_the_file_is_refused(tmp_path, key):
    path = tar_at(tmp_path / "x", FILE, **{key: "10"})
    with pytest.raises(NotOneFile, match="another entry that is no file"):
        unpack(path, NAME, LIMIT, lambda _: None)


def test_keys_that_change_nothing_are_read_over(tmp_path):
    path = tar_at(tmp_path / "x", FILE, mtime="1.5", comment="a=b\nc", **{"SCHILY.xattr.user.x": "y"})
    unpack(path, NAME, LIMIT, lambda _: None)
    assert path.read_bytes() == FILE[1]


def test_an_extended_header_may_give_the_name_and_the_size(tmp_path):
    path = tar_at(tmp_path / "x", ("short", b"x" * 2000, tarfile.REGTYPE), path=f"./{NAME}", size="1999")
    unpack(path, NAME, LIMIT, lambda _: None)
    assert path.read_bytes() == b"x" * 1999


@pytest.mark.parametrize("size", ["2561", "9" * 19, "9" * 30, "-1", "0x1", ""])
def test_a_size_in_an_extended_header_that_makes_no_sense_is_refused(tmp_path, size):
    path = tar_at(tmp_path / "x", FILE, size=size)
    with path.open("r+b") as file:
        file.truncate(512 * 3 + 2048 + 512)
    with pytest.raises(NotOneFile, match="is no whole tar"):
        unpack(path, NAME, LIMIT, lambda _: None)


@pytest.mark.parametrize("kind", ["pax 1.0", "GNU"])
def test_sparse_maps_are_refused_unread(tmp_path, kind):
    """Each had as many numbers as the layer has room for."""
    path = tmp_path / "x"
    if kind == "GNU":
        head = bytearray(tarfile.TarInfo(NAME).tobuf(tarfile.GNU_FORMAT))
        head[156:157], head[482] = tarfile.GNUTYPE_SPARSE, 1
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head[:512])
        more = b"77777777777\0" * 42 + b"\1" + bytes(7)
        path.write_bytes(head + more * 10_000)
    else:
        body = b"999999999\n" + b"4000000000\n" * 500_000
        tar_at(path, (NAME, body, tarfile.REGTYPE), **{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})
    tracemalloc.start()
    try:
        with pytest.raises(NotOneFile, match="another entry that is no file"):
            unpack(path, NAME, 1 << 30, lambda _: None)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_beyond_the_limit_is_refused_before_it_is_moved(tmp_path):
    path = tar_at(tmp_path / "x", FILE)
    before = path.read_bytes()
    with pytest.raises(LargerThanLimit) as large:
        unpack(path, NAME, len(FILE[1]) - 1, lambda _: None)
    assert large.value.size == len(FILE[1])
    assert path.read_bytes() == before


def test_a_wrong_checksum_is_refused(tmp_path):
    path = tar_at(tmp_path / "x", FILE, form=tarfile.USTAR_FORMAT)
    head = bytearray(path.read_bytes())
    head[108] ^= 1
    path.write_bytes(head)
    with pytest.raises(NotOneFile, match="is no whole tar"):
        unpack(path, NAME, LIMIT, lambda _: None)


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_tar_without_its_end_is_refused(tmp_path, blocks):
    path = tar_at(tmp_path / "x", FILE, form=tarfile.USTAR_FORMAT)
    with path.open("r+b") as file:
        file.truncate(512 + 2048 + 512 * blocks)
    with pytest.raises(NotOneFile, match="is no whole tar"):
        unpack(path, NAME, LIMIT, lambda _: None)


@pytest.mark.parametrize(("key", "words"), [("comment", ""), ("size", "another entry"), ("path", "another entry")])
def test_a_header_for_all_entries_gives_no_name_and_no_size(tmp_path, key, words):
    path = tmp_path / "x"
    with tarfile.open(path, "w", pax_headers={key: "10"}) as tar:
        entry = tarfile.TarInfo(NAME)
        entry.size = 2000
        tar.addfile(entry, io.BytesIO(FILE[1]))
    if words:
        with pytest.raises(NotOneFile, match=words):
            unpack(path, NAME, LIMIT, lambda _: None)
    else:
        unpack(path, NAME, LIMIT, lambda _: None)
        assert path.read_bytes() == FILE[1]


def test_a_size_as_gnu_tar_writes_large_ones_is_read(tmp_path):
    path = tar_at(tmp_path / "x", FILE, form=tarfile.GNU_FORMAT)
    head = bytearray(path.read_bytes())
    head[124:136] = b"\x80" + (2000).to_bytes(11)
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head[:512])
    path.write_bytes(head)
    unpack(path, NAME, LIMIT, lambda _: None)
    assert path.read_bytes() == FILE[1]
