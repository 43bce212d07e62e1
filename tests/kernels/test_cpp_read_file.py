"""Files that the compiled library reads on several threads."""

import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest

from motet_kernels.cpp import read_file
from testbed.compiled_kernels import compiled_library

UNIT = 128 * 1024
BEFORE = b"before "
SIZES = [0, 1, 7, 8, UNIT - 1, UNIT, UNIT + 1, 5 * UNIT + 13]


@pytest.mark.parametrize("size", SIZES)
def test_it_reads_all_bytes_and_only_them(size: int, tmp_path: Path) -> None:
    content = random.Random(size).randbytes(size)
    path = tmp_path / "file"
    path.write_bytes(BEFORE + content + b" after")
    memory = np.full(size + 2, 77, np.uint8)
    with path.open("rb") as file:
        found = read_file(compiled_library(), file.fileno(), len(BEFORE), memory[1:-1], 0)
    assert memory.tobytes() == b"M" + content + b"M"
    whole = size // 8 * 8
    words = sum(int.from_bytes(content[at : at + 8], "little") for at in range(0, whole, 8))
    assert found == (words + sum(content[whole:])) % 2**64


def test_the_end_of_the_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * UNIT))
    with path.open("rb") as file, pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        read_file(compiled_library(), file.fileno(), 0, np.zeros(3 * UNIT + 1, np.uint8), 0)


def test_an_error_of_the_file_is_raised(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        read_file(compiled_library(), file.fileno(), 0, np.zeros(8, np.uint8), 0)
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        read_file(compiled_library(), file.fileno(), 0, np.zeros(8, np.uint8), 1 << 30)
