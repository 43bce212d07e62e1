"""`motet adapter check`: says what a runner would say, from the folder of an adapter and the config of a base model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from motet.digest import adapter_digest
from motet.errors import AdapterIncompatible, SetupError
from motet_cli import adapter_check
from motet_runner.adapters.certification import certify
from motet_runner.execute.load.base_outline import limits_of
from motet_runner.interface import EngineConfig
from testbed.local_stack import BUNDLED
from tests.cli.test_commands import motet

MODEL, PIRATE = BUNDLED / "model", BUNDLED / "adapters" / "pirate"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Without weights."""
    (tmp_path / "base").mkdir()
    shutil.copy(MODEL / "config.json", tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PIRATE, tmp_path / "adapter"))


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("structlog.configure", lambda **_: None)  # that of this process


def configured(adapter: Path, **fields: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def run(adapter: Path, model: str | Path, tmp_path: Path, **more: Any) -> int:
    asked = {"dtype": None, "max_lora_rank": None, "as_json": True} | more
    return adapter_check.check(tmp_path / "data", adapter, model=str(model), **asked)


def test_a_good_adapter_is_served_and_its_digest_is_the_runners(
    adapter: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(adapter, base, tmp_path, dtype="float32") == 0
    found = json.loads(capsys.readouterr().out)
    certificate = certify(PIRATE, limits_of(EngineConfig(model=MODEL, dtype="float32"))).certificate
    assert found == {
        "adapter": str(adapter),
        "model": str(base),
        "dtype": "float32",
        "max_lora_rank": 64,
        "served": True,
        "reason": "",
        "message": "",
        "method": "lora",
        "rank": certificate.rank,
        "alpha": certificate.alpha,
        "scales": [certificate.alpha / certificate.rank],
        "linears": list(certificate.target_modules),
        "warnings": [],
        "digest": adapter_digest(PIRATE),
        "bytes": sum(path.stat().st_size for path in PIRATE.iterdir() if path.name.startswith("adapter_")),
    }


def test_a_person_reads_the_verdict_with_warnings(
    adapter: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configured(adapter, task_type="SEQ_CLS")
    assert run(adapter, base, tmp_path, as_json=False) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"served on {base} (bfloat16, ranks up to 64) rank 8 scale 2 (lora_alpha 16) linears 28: ")
    assert "warning task_type is SEQ_CLS, so it was not trained to generate text" in said


@pytest.mark.parametrize(
    ("fields", "reason", "says"),
    [
        ({"use_dora": True}, "UnknownField", "use_dora"),
        ({"r": 4}, "ShapeMismatch", "model.layers.0.mlp.down_proj"),
        ({"lora_alpha": "many"}, "UnknownField", "lora_alpha"),
    ],
)
def test_a_refusal_names_the_field_or_the_tensor_in_the_runners_words(
    fields: dict[str, object], reason: str, says: str, *, adapter: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path = adapter.parent
    configured(adapter, **fields)
    assert run(adapter, base, tmp_path) == 1
    found = json.loads(capsys.readouterr().out)
    with pytest.raises(AdapterIncompatible, match=says) as refused:
        certify(adapter, limits_of(EngineConfig(model=base)))
    assert (found["served"], found["message"], found["reason"]) == (False, str(refused.value), reason)
    assert found["digest"] == adapter_digest(adapter)
    assert run(adapter, base, tmp_path, as_json=False) == 1
    assert capsys.readouterr().out.startswith(f"refused ({reason}) on {base} (bfloat16, ranks up to 64): ")


def test_a_rank_above_the_pools_is_refused(
    adapter: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(adapter, base, tmp_path, max_lora_rank=4) == 1
    assert json.loads(capsys.readouterr().out)["reason"] == "RankTooLarge"


def test_a_folder_without_an_adapter_is_refused_like_a_runner_would(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(MODEL, base, tmp_path) == 1
    found = json.loads(capsys.readouterr().out)
    assert "has no adapter_config.json" in found["message"]
    assert (found["digest"], found["bytes"], found["rank"]) == ("", 0, None)


def test_what_cannot_be_checked_is_named(adapter: Path, base: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"does not exist\. Name the folder that PEFT's save_pretrained"):
        run(tmp_path / "none", base, tmp_path)
    with pytest.raises(SetupError, match=r"is no folder\. Name the folder"):
        run(adapter / "adapter_config.json", base, tmp_path)
    with pytest.raises(SetupError, match="--model 'llama' is no folder, and no local stack runs"):
        run(adapter, "llama", tmp_path)
    with pytest.raises(SetupError, match=r"engine\.dtype 'int3' is unknown"):
        run(adapter, base, tmp_path, dtype="int3")


def test_the_command_ends_with_the_verdict(adapter: Path, base: Path, tmp_path: Path) -> None:
    configured(adapter, bias="all", lora_bias=True)
    done = motet("adapter", "check", str(adapter), "--model", str(base))
    assert (done.returncode, done.stderr) == (1, "")
    assert "lora_bias" in done.stdout
    done = motet("adapter", "check", str(adapter), "--data-dir", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no --model was given, and no local stack runs" in done.stderr
