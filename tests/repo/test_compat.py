"""`make compat`: which versions it takes, and that the tests that it runs are there."""

from pathlib import Path

import pytest

from tests.repo.tree import ROOT
from tools import compat


def project(requirement: str) -> str:
    return f'[project.optional-dependencies]\nrunner = ["torch>=2", "{requirement}"]\n'


def test_the_oldest_version_is_the_bound_and_the_newest_is_left_to_pip() -> None:
    found = compat.requirements(project("transformers>=5.18, <5.24"))
    assert found == {"oldest": "transformers==5.18", "newest": "transformers>=5.18,<5.24"}


@pytest.mark.parametrize("requirement", ["transformers", "transformers>=5", "transformers==5.18", "transformers<6,>=5"])
def test_without_two_bounds_it_does_not_know_what_to_run(requirement: str) -> None:
    with pytest.raises(compat.CannotRun, match="needs transformers>=OLDEST,<NEXT"):
        compat.requirements(project(requirement))


def test_it_understands_the_products_own_requirement_and_finds_its_tests() -> None:
    assert compat.requirements((ROOT / "pyproject.toml").read_text()).keys() == {"oldest", "newest"}
    assert all((ROOT / path).is_file() for path in compat.SUITE)


def test_without_the_package_index_it_says_so_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}.items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "oldest").mkdir()
    with pytest.raises(compat.CannotRun, match=r"The package index gave no transformers==5\.18"):
        compat.install("transformers==5.18", tmp_path / "oldest")
    assert [path.name for path in tmp_path.iterdir()] == ["oldest"]


def test_the_tests_run_with_the_library_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "transformers.py").write_text("__version__ = 'of the folder'\n")
    test = tmp_path / "test_version.py"
    test.write_text("import transformers\ndef test(): assert transformers.__version__ == 'of the folder'\n")
    monkeypatch.setattr(compat, "SUITE", (str(test),))
    assert compat.run_suite(tmp_path / "library", ["-p", "no:cacheprovider"]) == 0
    with pytest.raises(compat.CannotRun, match="cannot be imported"):
        compat.run_suite(tmp_path, [])
