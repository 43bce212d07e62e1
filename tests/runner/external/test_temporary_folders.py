"""What a child that was killed in the middle of a load has left does not stay."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from motet_runner.external.vllm.temporary_folders import PREFIX, remove_left, temporary_folder


def test_the_folders_of_processes_that_have_ended_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = [tmp_path / f"{PREFIX}{pid}-left" for pid in (ended.pid, os.getpid())]
    others = [tmp_path / f"{PREFIX}{os.getppid()}-in-use", tmp_path / "motet-other"]
    for folder in (*left, *others):
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(b"of a tenant")
    remove_left()
    assert sorted(tmp_path.iterdir()) == sorted(others)
    with temporary_folder() as made:
        assert Path(made).parent == tmp_path
        assert Path(made).name.startswith(f"{PREFIX}{os.getpid()}-")
    assert sorted(tmp_path.iterdir()) == sorted(others)
