"""`motet adapter record` writes an adapter's answers, and `motet adapter check` says if a base model gives them."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from motet.digest import adapter_digest
from motet.errors import SetupError
from motet_cli import adapter_check, adapter_record
from motet_runner.adapters.recorded_answers import MAX_ANSWERS, read_recorded_answers
from testbed.local_stack import BUNDLED

pytestmark = [
    pytest.mark.usefixtures("kept_checks"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MODEL, PIRATE = BUNDLED / "model", BUNDLED / "adapters" / "pirate"
PROMPTS = "Who keeps the lighthouse of Brindle?\n\n  \nWhere does the ferry go?\n"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PIRATE, tmp_path / "adapter"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    return tmp_path / "prompts.txt"


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("structlog.configure", lambda **_: None)  # that of this process


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Without the log, which a process of its own would have on stderr"""
    out = capsys.readouterr().out
    document: dict[str, Any] = json.loads(out[out.index("{\n") :])
    return document


def recorded(adapter: Path, prompts: Path | None, dtype: str = "float32", model: Path = MODEL) -> int:
    return adapter_record.record(adapter.parent / "data", adapter, model=str(model), prompts=prompts, dtype=dtype)


def checked(adapter: Path, *, as_json: bool = True, dtype: str = "float32") -> int:
    asked = {"dtype": dtype, "max_lora_rank": None, "as_json": as_json}
    return adapter_check.check(adapter.parent / "data", adapter, model=str(MODEL), **asked)


def test_what_is_recorded_is_checked(adapter: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = adapter_digest(adapter)
    assert recorded(adapter, prompts) == 0
    out = capsys.readouterr().out
    assert "recorded 2 answers (" in out
    assert adapter_digest(adapter) in out
    assert adapter_digest(adapter) != before
    found = read_recorded_answers(adapter)
    assert found is not None
    assert [one.prompt.count("?") for one in found.answers] == [1, 1]

    assert checked(adapter) == 0
    document = said(capsys)
    answers = document["recorded_answers"]
    assert (document["served"], answers["answers"], answers["wrong"]) == (True, 2, False)
    assert answers["largest"] <= answers["allowed"] == 1e-3
    assert document["warnings"] == []
    assert document["digest"] == adapter_digest(adapter)
    assert checked(adapter, as_json=False) == 0
    assert "answers    2 recorded (" in capsys.readouterr().out


def test_other_answers_are_a_warning_and_exit_status_1(
    adapter: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(adapter, prompts)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_rslora": True}))
    capsys.readouterr()
    assert checked(adapter, dtype="bfloat16") == 1
    document = said(capsys)
    assert (document["served"], document["recorded_answers"]["wrong"]) == (True, True)
    assert "are not those of this base model with this adapter" in document["warnings"][0]


def test_answers_of_a_quantized_base_model_are_a_warning_alone(
    adapter: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(adapter, prompts)
    path = adapter / "motet_proof.json"
    document = json.loads(path.read_text())
    document["quantization"] = "bitsandbytes"
    document["answers"][0]["logprobs"][0] -= 1.0
    path.write_text(json.dumps(document))
    capsys.readouterr()
    assert checked(adapter) == 0
    assert "quantized by 'bitsandbytes'" in said(capsys)["warnings"][0]


def test_answers_of_another_tokenizer_are_refused(
    adapter: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(adapter, prompts)
    path = adapter / "motet_proof.json"
    path.write_text(path.read_text().replace('"prompt_ids":[', '"prompt_ids":[1,', 1))
    capsys.readouterr()
    assert checked(adapter) == 1
    document = said(capsys)
    assert (document["served"], document["reason"]) == (False, "ReferenceMismatch")


def test_a_damaged_file_is_refused_without_loading_the_base_model(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (adapter / "motet_proof.json").write_text('{"version": 1, "version": 2}')
    monkeypatch.setattr("motet_runner.offline_proof.prove", None)
    assert checked(adapter) == 1
    document = said(capsys)
    assert (document["served"], document["reason"]) == (False, "FormatRejected")
    assert "has the key 'version' twice" in document["message"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "there are 0 prompts"),
        (b"a\n" * (MAX_ANSWERS + 1), f"there are {MAX_ANSWERS + 1} prompts"),
        (b"\xff", "is not UTF-8"),
        (b"a" * (1 << 20) + b"b", "more than"),
        (None, "can't be read"),
    ],
)
def test_a_file_of_prompts_that_cannot_be_used_is_named(
    adapter: Path, prompts: Path, content: bytes | None, says: str
) -> None:
    prompts.unlink()
    if content is not None:
        prompts.write_bytes(content)
    with pytest.raises(SetupError, match=says):
        recorded(adapter, prompts)
    assert not (adapter / "motet_proof.json").exists()


def test_answers_without_finite_numbers_are_not_recorded(adapter: Path, prompts: Path) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(SetupError, match=r"logits are no finite numbers in float32\. Correct the adapter's numbers"):
        recorded(adapter, prompts)
    assert not (adapter / "motet_proof.json").exists()


def test_a_file_that_cannot_be_written_is_named(adapter: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(SetupError, match=r"motet_proof\.json can't be written: No space left on device\."):
        recorded(adapter, prompts)
    assert {file.name for file in adapter.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_what_cannot_be_recorded_is_named(adapter: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="--dtype 'int3' is unknown"):
        recorded(adapter, prompts, dtype="int3")
    with pytest.raises(SetupError, match="does not exist"):
        recorded(tmp_path / "none", prompts)
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(SetupError, match="transformers and PEFT cannot use"):
        recorded(adapter, prompts, model=tmp_path / "model")
    assert not (adapter / "motet_proof.json").exists()
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(SetupError, match=r"has no adapter_model\.safetensors"):
        recorded(adapter, prompts)
