"""The names of transformers' models are read again once a file has changed."""

import marshal
from collections.abc import Callable
from pathlib import Path

import pytest

from motet_runner.kept_names import FILE, keeping

Find = Callable[[str], dict[str, frozenset[str]]]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "transformers" / "models"
    for name in ("auto", "llama"):
        (folder / name).mkdir(parents=True)
        (folder / name / f"modeling_{name}.py").write_text(f"__all__ = ['{name}']")
    return folder


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def find(asked: list[str]) -> Find:
    def reading(folder: str) -> dict[str, frozenset[str]]:
        asked.append(folder)
        return {str(one): frozenset([one.read_text()]) for one in sorted(Path(folder).rglob("*.py"))}

    return reading


def test_a_process_reads_all_models_once_by_any_path_and_the_next_process_not_at_all(
    models: Path, asked: list[str], find: Find, tmp_path: Path
) -> None:
    kept = tmp_path / "new" / "kernels"
    first = keeping(find, kept)
    assert first(models) == first(f"{models}/__init__.py") == first(str(models))
    assert asked == [str(models)]
    assert keeping(find, kept)(models) == first(models)
    assert asked == [str(models)]
    assert [one.name for one in kept.iterdir()] == [FILE]


@pytest.mark.parametrize("change", ["another text", "a new file", "a file less"])
def test_a_changed_folder_is_read_again(
    change: str, models: Path, asked: list[str], find: Find, tmp_path: Path
) -> None:
    before = keeping(find, tmp_path)(models)
    match change:
        case "another text":
            (models / "llama" / "modeling_llama.py").write_text("__all__ = ['other']")
        case "a new file":
            (models / "auto" / "more.py").write_text("")
        case _:
            (models / "llama" / "modeling_llama.py").unlink()
    after = keeping(find, tmp_path)(models)
    assert len(asked) == 2
    assert after != before
    assert keeping(find, tmp_path)(models) == after
    assert len(asked) == 2


@pytest.mark.parametrize("damaged", [b"", b"\xff\xff", marshal.dumps(7), marshal.dumps((b"of another", {}))])
def test_a_damaged_file_is_written_again(
    damaged: bytes, models: Path, asked: list[str], find: Find, tmp_path: Path
) -> None:
    (tmp_path / FILE).write_bytes(damaged)
    found = keeping(find, tmp_path)(models)
    assert found == find(str(models))
    keeping(find, tmp_path)(models)
    assert len(asked) == 2  # and once above


def test_without_a_folder_to_write_to_every_start_reads(
    models: Path, asked: list[str], find: Find, tmp_path: Path
) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    for kept in (None, no_folder):
        assert keeping(find, kept)(models) == find(str(models))
    assert len(asked) == 4
    assert no_folder.read_text() == ""


def test_a_single_model_is_read_each_time(models: Path, asked: list[str], find: Find, tmp_path: Path) -> None:
    for _ in range(2):
        keeping(find, tmp_path)(models / "llama" / "__init__.py")
    assert asked == [str(models / "llama")] * 2
    assert not (tmp_path / FILE).exists()
