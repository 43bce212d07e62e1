"""`motet adapter check`: says what a runner would say, from the folder of an adapter and the config of a base model."""

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from motet.digest import adapter_digest
from motet.errors import AdapterIncompatible, ModelFolderError, SetupError
from motet_cli import adapter_check
from motet_cli.adapter_push import push
from motet_runner import adapter_inspection, answer_recording, offline_proof
from motet_runner.adapters.certification import certify
from motet_runner.adapters.check_processes import CheckProcesses
from motet_runner.execute.load.base_outline import limits_of
from motet_runner.interface import EngineConfig
from testbed.local_stack import BUNDLED
from testbed.proof_mutants import PLAIN as PROOF_MUTANTS
from tests.cli.standing_stack import standing_stack
from tests.support.forked_motet import motet

pytestmark = pytest.mark.usefixtures("kept_checks")
MODEL, PIRATE = BUNDLED / "model", BUNDLED / "adapters" / "pirate"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without weights."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copy(MODEL / "config.json", folder)
    return folder


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
    asked = {"dtype": None, "max_lora_rank": None, "as_json": True, "proves": False} | more
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
        "template_characters": 0,
        "warnings": [],
        "digest": adapter_digest(PIRATE),
        "bytes": sum(path.stat().st_size for path in PIRATE.iterdir() if path.name.startswith("adapter_")),
    }


def test_a_template_of_its_own_is_shown_and_a_broken_one_refused(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert run(adapter, MODEL, tmp_path, as_json=False) == 0
    assert "template its own, 25 characters" in " ".join(capsys.readouterr().out.split())
    (adapter / "chat_template.jinja").write_text((MODEL / "chat_template.jinja").read_text())
    assert run(adapter, MODEL, tmp_path, as_json=False) == 0
    assert "template the base model's" in " ".join(capsys.readouterr().out.split())
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }")
    assert run(adapter, MODEL, tmp_path) == 1
    assert "chat_template.jinja, line 1: unexpected '}'" in json.loads(capsys.readouterr().out)["message"]


def test_another_tokenizer_than_the_base_models_is_refused(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    tokenizer["padding"] = None
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert run(adapter, MODEL, tmp_path) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []
    odd = tokenizer | {"normalizer": {"type": "Replace", "pattern": {"String": "never in a text"}, "content": ""}}
    (adapter / "tokenizer.json").write_text(json.dumps(odd))
    assert run(adapter, MODEL, tmp_path) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning.startswith("tokenizer.json: normalizer is not that of the base model's tokenizer, which is used: ")
    tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][0], id=1 << 20, content="<|more|>"))
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert run(adapter, MODEL, tmp_path) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["reason"] == "TokenizerDiffers"
    assert "tokenizer.json: '<|more|>' has the id" in found["message"]


def test_a_person_reads_the_verdict_with_warnings(
    adapter: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configured(adapter, task_type="SEQ_CLS")
    assert run(adapter, base, tmp_path, as_json=False) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(
        f"served on {base} (bfloat16, ranks up to 64) rank 8 scale 2 (lora, lora_alpha 16) linears 28: "
    )
    assert "warning task_type is SEQ_CLS, so it was not trained to generate text" in said


@pytest.mark.parametrize(
    ("fields", "reason", "says"),
    [
        ({"use_dora": True}, "UnmappedTensors", "use_dora"),
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


def test_a_check_that_cannot_run_is_no_refusal(
    adapter: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_inspection, "CheckProcesses", CheckProcesses)  # a new process, not a kept one
    monkeypatch.setattr("motet_runner.adapters.check_processes.sys.executable", "/bin/false")
    with pytest.raises(SetupError, match=rf"the check of {adapter} could not be finished: its process has") as failed:
        run(adapter, base, tmp_path)
    assert "automatically" not in failed.value.message


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
    with pytest.raises(SetupError, match="--dtype 'int3' is unknown"):
        run(adapter, base, tmp_path, dtype="int3")


TOO_LONG = "a" * 300


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((TOO_LONG,), "File name too long"),
        (("~nobody-has-this-name/x",), "Could not determine home directory"),
        ((str(PIRATE), "--model", TOO_LONG), "File name too long"),
        ((str(PIRATE), "--model", "~nobody-has-this-name/x"), "Could not determine home directory"),
        ((str(PIRATE), "--data-dir", f"/tmp/{TOO_LONG}"), "File name too long"),
        ((str(PIRATE), "--data-dir", "~nobody-has-this-name/x"), "Could not determine home directory"),
        (("/tmp/a\udcff",), "is not UTF-8. Rename it"),
    ],
)
def test_a_name_that_no_folder_can_have_is_an_error_of_use(arguments: tuple[str, ...], says: str) -> None:
    done = motet("adapter", "check", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_a_file_that_may_not_be_read_is_named(
    adapter: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stat = os.stat

    def denied(path: Any, **more: Any) -> os.stat_result:
        if str(path).startswith(str(private)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr("os.stat", denied)
    private = adapter / "adapter_config.json"
    assert run(adapter, base, tmp_path) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["message"] == f"{adapter} can't be read: Permission denied."
    for private in (adapter, base, base / "config.json"):
        with pytest.raises(SetupError, match=rf"{private} can't be read: Permission denied"):
            run(adapter, base, tmp_path)


@pytest.mark.parametrize("model", [None, "motet-demo", "default/demo"])
def test_the_base_model_of_a_running_stack_needs_no_folder(
    model: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with standing_stack(tmp_path) as stack:
        pool = json.loads((stack.manifests / "pool.json").read_text())
        pool["spec"]["engine"] |= {"maxLoraRank": 4, "dtype": "float16"}
        pool["spec"]["admission"] = {"maxAdapterSizeBytes": 300_000}
        (stack.manifests / "pool.json").write_text(json.dumps(pool))
        asked = {"model": model, "as_json": True, "proves": False}
        assert adapter_check.check(stack.data, PIRATE, dtype=None, max_lora_rank=None, **asked) == 1
        found = json.loads(capsys.readouterr().out)
        assert (found["model"], found["dtype"]) == (str(stack.manifests / "model"), "float16")
        assert (found["max_lora_rank"], found["reason"]) == (4, "RankTooLarge")
        assert adapter_check.check(stack.data, PIRATE, dtype="float32", max_lora_rank=8, **asked) == 0
        assert json.loads(capsys.readouterr().out)["dtype"] == "float32"
        oneword = BUNDLED / "adapters" / "oneword"
        assert adapter_check.check(stack.data, oneword, dtype=None, max_lora_rank=None, **asked) == 1
        assert json.loads(capsys.readouterr().out)["reason"] == "TooLarge"


def test_the_largest_adapter_is_the_one_that_the_stacks_runners_take(
    tmp_path: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (adapter / "adapter_model.safetensors").open("ab") as weights:
        weights.truncate((1 << 20) + 1)
    asked = {"model": None, "dtype": None, "max_lora_rank": None, "as_json": True}
    with standing_stack(tmp_path, env={"MOTET_RUNNER_MAX_ADAPTER_MIB": "1"}) as stack:
        assert adapter_check.check(stack.data, adapter, **asked) == 1
        assert json.loads(capsys.readouterr().out)["reason"] == "TooLarge"
        assert (
            push(stack.data, adapter, name="desk", namespace="default", model=None, wait_seconds=0, as_json=True) == 1
        )
        assert json.loads(capsys.readouterr().out)["check"]["reason"] == "TooLarge"


def test_a_base_model_of_a_hub_needs_a_folder(tmp_path: Path) -> None:
    with standing_stack(tmp_path) as stack:
        pool = json.loads((stack.manifests / "pool.json").read_text())
        pool["spec"]["model"]["uri"] = "hf://org/base"
        (stack.manifests / "pool.json").write_text(json.dumps(pool))
        with pytest.raises(SetupError, match=r"hf://org/base is not a folder of this machine\. Name the folder"):
            adapter_check.check(stack.data, PIRATE, model=None, dtype=None, max_lora_rank=None, as_json=True)


def test_the_command_ends_with_the_verdict(adapter: Path, base: Path, tmp_path: Path) -> None:
    configured(adapter, bias="all", lora_bias=True)
    done = motet("adapter", "check", str(adapter), "--model", str(base))
    assert (done.returncode, done.stderr) == (1, "")
    assert "lora_bias" in done.stdout
    done = motet("adapter", "check", str(adapter), "--data-dir", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no --model was given, and no local stack runs" in done.stderr


# ------------------------------------------------------------------------------------------------------------ the proof


def proved(adapter: Path, model: Path, capsys: pytest.CaptureFixture[str], **more: Any) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = run(adapter, model, adapter.parent, dtype="float32", proves=True, **more)
    out = capsys.readouterr().out
    return status, json.loads(out[out.index("{\n") :])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_engine_and_peft_compute_the_adapter(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = proved(adapter, MODEL, capsys)
    assert (status, found["not_proved"], found["not_with_peft"]) == (0, "", "")
    assert found["proof"]["moved"] > 1
    assert found["proof"]["kernels"]
    assert (found["peft"]["answers"], found["peft"]["wrong"]) == (3, False)
    assert found["peft"]["largest"] <= found["peft"]["allowed"] == 1e-3
    assert not (adapter / "motet_proof.json").exists(), "nothing is written"
    assert run(adapter, MODEL, adapter.parent, as_json=False, dtype="float32", proves=True) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "right every linear, in the engine's memory (float32, " in said
    assert "acts moves a logit by " in said
    assert "peft 3 of PEFT (" in said


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapter_that_peft_computes_otherwise_is_exit_status_1(
    adapter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if Motet's reader of the configuration forgot rank-stabilised LoRA: the linears are then as the engine was
    told, and only PEFT knows better."""
    configured(adapter, use_rslora=True)
    given = answer_recording.answers_of_peft

    def of_the_real_config(order: answer_recording.Recording) -> Any:
        configured(adapter, use_rslora=True)
        return given(order)

    monkeypatch.setattr(offline_proof, "answers_of_peft", of_the_real_config)
    configured(adapter, use_rslora=False)
    status, found = proved(adapter, MODEL, capsys)
    assert (status, found["served"], found["peft"]["wrong"]) == (1, True, True)
    assert found["proof"] is not None
    assert found["warnings"][-1].startswith("PEFT computes something else than Motet's engine: the log probability of")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_the_engine_computes_wrongly_is_refused_as_a_runner_does(
    adapter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    PROOF_MUTANTS["no scale"](monkeypatch)
    status, found = proved(adapter, MODEL, capsys)
    assert (status, found["served"], found["reason"]) == (1, False, "ProofFailed")
    assert "is off by" in found["message"]


def test_what_this_machine_cannot_do_is_said_and_refuses_nothing(
    adapter: Path, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = proved(adapter, base, capsys)
    assert (status, found["proof"], found["peft"]) == (0, None, None)
    assert "it has neither model.safetensors nor" in found["not_proved"]
    assert found["not_with_peft"] == found["not_proved"]

    (base / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ModelFolderError, match=r"model\.safetensors is damaged: .*Copy it there again"):
        proved(adapter, base, capsys)

    monkeypatch.setattr(offline_proof, "available_host_bytes", lambda: 100 << 20)
    monkeypatch.setattr(offline_proof, "OfflineEngine", None)
    status, found = proved(adapter, MODEL, capsys)
    assert (status, found["proof"], found["peft"]) == (0, None, None)
    says = "the base model takes about 0.3 GiB in float32, and 0.1 GiB are left here"
    assert (found["not_proved"], found["not_with_peft"]) == (says, says)
    assert run(adapter, MODEL, adapter.parent, as_json=False, dtype="float32", proves=True) == 0
    assert f"proof not done: {says} peft not done: {says}" in " ".join(capsys.readouterr().out.split())


def test_without_peft_the_engine_proves_alone(
    adapter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "peft" else find(name))
    status, found = proved(adapter, MODEL, capsys)
    assert (status, found["peft"]) == (0, None)
    assert found["proof"]["moved"] > 1
    assert found["not_with_peft"] == "PEFT is not installed (pip install peft)"


WITHOUT_TORCH = """
import sys
sys.modules.update(torch=None, transformers=None)
"""


def test_without_torch_the_command_says_what_is_missing(tmp_path: Path) -> None:
    program = WITHOUT_TORCH + "from motet_cli.main import main; main()"
    arguments = ["adapter", "check", str(PIRATE), "--model", str(MODEL), "--data-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "motet: without torch nothing says which linears a base model has. Install motet[runner].\n"


def test_the_check_itself_needs_no_torch() -> None:
    """Where the linears are known, as in a runner's service."""
    limits = limits_of(EngineConfig(model=MODEL))
    program = WITHOUT_TORCH + (
        "from pathlib import Path\n"
        "from motet_runner.adapter_inspection import verdict_on\n"
        "from motet_runner.adapters.certification import EngineLimits\n"
        f"limits = EngineLimits({limits.target_modules!r}, {limits.max_lora_rank}, {limits.dtype!r})\n"
        f"print(verdict_on(Path({str(PIRATE)!r}), limits, max_bytes=1 << 30).digest)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == adapter_digest(PIRATE)
