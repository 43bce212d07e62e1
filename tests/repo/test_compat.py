"""`make compat`: which versions it takes, and that its tests run with them."""

from pathlib import Path

import pytest

from testbed.tree import ROOT
from tools import compat


def requirements(requirement: str) -> dict[str, str]:
    return compat.requirements(f'[project.optional-dependencies]\nrunner = ["torch>=2", "{requirement}"]\n')


def test_the_oldest_version_is_the_bound_and_the_newest_is_left_to_pip() -> None:
    found = requirements("transformers>=5.18, <5.24")
    assert found == {"oldest": "transformers==5.18", "newest": "transformers>=5.18,<5.24"}
    for unbound in ("transformers", "transformers>=5", "transformers==5.18", "transformers<6,>=5"):
        with pytest.raises(compat.CannotRun, match="needs transformers>=OLDEST,<NEXT"):
            requirements(unbound)
    assert compat.requirements((ROOT / "pyproject.toml").read_text()).keys() == {"oldest", "newest"}
    assert all((ROOT / path).is_file() for path in compat.SUITE)


def test_the_tests_run_with_the_library_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "transformers.py").write_text("__version__ = 'of the folder'\n")
    test = tmp_path / "test_version.py"
    test.write_text("import transformers\ndef test(): assert transformers.__version__ == 'of the folder'\n")
    monkeypatch.setattr(compat, "SUITE", (str(test),))
    assert compat.run_suite(tmp_path / "library", ["-p", "no:cacheprovider"]) == 0
    with pytest.raises(compat.CannotRun, match="cannot be imported"):
        compat.run_suite(tmp_path, [])


def test_an_older_vllm_is_the_one_that_the_tests_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, test = tmp_path / "older", tmp_path / "test_older.py"
    test.write_text(f"import os\ndef test(): assert os.environ['MOTET_PEER'] == '{older}'\n")
    monkeypatch.setenv("MOTET_PEER_0_31", str(older))
    monkeypatch.setattr(compat, "SUITE_OF_VLLM", (str(test),))
    assert compat.run_suite_of_vllm(["--no-such-option"]) == 0, "it is not built"
    (older / "bin").mkdir(parents=True)
    (older / "bin" / "python").touch()
    assert compat.run_suite_of_vllm(["-p", "no:cacheprovider"]) == 0
    test.write_text("def test(): assert False\n")
    assert compat.run_suite_of_vllm(["-p", "no:cacheprovider"]) == 1
