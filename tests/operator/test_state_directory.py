"""Where things lie, and who holds the lock."""

import os
import stat
from pathlib import Path

import pytest

from motet.errors import StateDirectoryError
from motet_operator.local.lock import StackLock, is_held, read_holder
from motet_operator.local.state_directory import MAX_INSTANCE_NAME, MAX_SOCKET_PATH, StateDirectory

LONGEST = "x" * MAX_INSTANCE_NAME


def test_sockets_lie_in_the_state_directory_where_the_path_allows(tmp_path: Path) -> None:
    layout = StateDirectory(Path("/tmp/short"))
    assert layout.sockets == Path("/tmp/short/run")
    assert len(layout.metrics_address(LONGEST)) < MAX_SOCKET_PATH


def test_a_deep_state_directory_has_its_sockets_elsewhere_and_remembers_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    deep = tmp_path / ("d" * 60)
    layout = StateDirectory.of(deep)
    layout.prepare()
    elsewhere = layout.sockets
    try:
        assert elsewhere.parent == Path("/tmp")
        assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o700
        assert len(layout.metrics_address(LONGEST)) < MAX_SOCKET_PATH
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
        assert StateDirectory.of(deep).sockets == elsewhere, "another shell must look where they are"
    finally:
        layout.clear_run()
    assert not elsewhere.exists()
    assert not layout.run.exists()


def test_a_socket_folder_that_others_could_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    layout = StateDirectory.of(tmp_path / ("e" * 60))
    layout.sockets.mkdir(mode=0o777)
    layout.sockets.chmod(0o777)
    try:
        with pytest.raises(StateDirectoryError, match="Other users can access that folder"):
            layout.prepare()
    finally:
        layout.sockets.rmdir()


def test_the_run_folder_is_private(tmp_path: Path) -> None:
    layout = StateDirectory.of(tmp_path / "d")
    layout.prepare()
    assert stat.S_IMODE(layout.run.stat().st_mode) == 0o700
    assert list(layout.data.glob(".trial*")) == []
    layout.clear_run()


def test_a_state_directory_has_one_stack(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not is_held(lock)
    with StackLock(lock, url="http://here"):
        assert is_held(lock)
        assert read_holder(lock).pid == os.getpid()
        with pytest.raises(StateDirectoryError, match=r"already runs at http://here .*motet down --data-dir"):
            StackLock(lock).__enter__()
    assert not is_held(lock)
    with StackLock(lock):
        pass
