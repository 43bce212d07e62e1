"""`motet.client`: what a training program hands over is saved, checked and declared. docs/tutorials/notebook.md does it
on a whole stack, with an answer at the end."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from motet import client
from motet.client import PublishCallback, Published, PublishFailed, publish
from motet.digest import RECORD_FILE, adapter_digest, hex_of
from motet_cli.adapter_bases import base_named
from motet_cli.adapter_check import check_document
from motet_runner.adapters.recorded_answers import read_recorded_answers
from motet_runner.base_tokenizer import read_tokenizer
from testbed.local_stack import BUNDLED
from tests.cli.standing_stack import StandingStack, standing_stack

PIRATE = BUNDLED / "adapters" / "pirate"


class Model:
    """As a model of PEFT with adapters: it saves files of ours."""

    def __init__(self, *, active: str = "default", files: Path = PIRATE) -> None:
        self.peft_config: dict[str, object] = {active: object()}
        self.active_adapter = active
        self._files = files

    def save_pretrained(self, save_directory: str, *, selected_adapters: list[str]) -> None:
        assert selected_adapters == [self.active_adapter]
        own = "" if self.active_adapter == "default" else self.active_adapter
        shutil.copytree(self._files, Path(save_directory) / own, dirs_exist_ok=True)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[StandingStack]:
    with standing_stack(tmp_path) as stack:
        yield stack


def published(stack: StandingStack, model: Model, **how: Any) -> Published:
    return publish(model, name="desk", data_dir=stack.data, wait_seconds=0, **how)


def test_the_active_adapter_is_checked_and_declared(stack: StandingStack) -> None:
    """One with a name, which PEFT saves in a folder of its own. The trainer's below has none."""
    digest = adapter_digest(PIRATE)
    assert published(stack, Model(active="second"), namespace="acme") == Published(
        name="acme/desk", digest=digest, ready=False, manifest=str(stack.manifests / "acme.desk.pushed.yaml")
    )
    assert (stack.data / "adapters" / hex_of(digest)).is_dir()


def test_a_refusal_says_why_and_leaves_nothing(stack: StandingStack, tmp_path: Path) -> None:
    files = Path(shutil.copytree(PIRATE, tmp_path / "dora"))
    config = files / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    with pytest.raises(PublishFailed, match=r"^default/desk is not published: .*lora_magnitude_vector.*use_dora"):
        published(stack, Model(files=files))
    assert not list(stack.manifests.glob("*.pushed.yaml"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"base_model": "none"}, "no pool serves the base model 'none'"),
        ({"to": "s3://Bucket/x"}, "--to: s3://Bucket/x does not name a bucket"),
        ({"namespace": "--help"}, "--namespace: "),
    ],
)
def test_what_the_command_says_is_in_the_exception(stack: StandingStack, how: dict[str, str], words: str) -> None:
    with pytest.raises(PublishFailed, match=words):
        published(stack, Model(), **how)


def test_a_folder_that_takes_no_adapter_is_named(stack: StandingStack, tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    with pytest.raises(PublishFailed, match=rf"the adapter cannot be saved in {file}: "):
        published(stack, Model(), folder=file)


@pytest.mark.parametrize("seconds", [0.5, -1.0, float("nan")])
def test_a_wait_that_no_command_takes_is_named(seconds: float) -> None:
    """Before a training, too."""
    with pytest.raises(PublishFailed, match=r"wait_seconds is .*\. Give at least 1, or 0 not to wait\."):
        PublishCallback(name="desk", wait_seconds=seconds)


def test_answers_of_earlier_weights_are_not_published_with_these(stack: StandingStack, tmp_path: Path) -> None:
    for active in ("default", "second"):
        saved = tmp_path / "saved" / ("" if active == "default" else active)
        saved.mkdir(exist_ok=True)
        (saved / RECORD_FILE).write_text("{}")
        assert published(stack, Model(active=active), folder=tmp_path / "saved").digest == adapter_digest(PIRATE)
        assert not (saved / RECORD_FILE).exists()


def test_a_command_that_says_nothing_or_too_much_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for code, words in [("", "said nothing"), ("import sys; sys.exit('x' * 10**6)", "published: x+$")]:
        monkeypatch.setattr(client, "PUSH", (sys.executable, "-c", code))
        with pytest.raises(PublishFailed, match=words) as failed:
            client.Publication(name="desk").push(tmp_path)
        assert len(str(failed.value)) < client.MAX_REASON_CHARACTERS + 100


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"name": "acme/desk"}, "--as acme/desk"),
        ({"name": "desk", "namespace": "acme"}, "--as desk --namespace acme"),
    ],
)
def test_a_name_may_have_its_namespace(given: dict[str, str], options: str, tmp_path: Path) -> None:
    """As `Published.name` has it."""
    assert f" {tmp_path} {options} " in client.Publication(**given).command(tmp_path).replace("=", " ")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model", [SimpleNamespace(), SimpleNamespace(peft_config={}, active_adapter="default"),
              SimpleNamespace(peft_config={"a": 1, "b": 1}, active_adapter=["a", "b"]),
              SimpleNamespace(peft_config={"a": 1, "b": 1}, active_adapter="a", active_adapters=["a", "b"])]
)  # fmt: skip
def test_what_is_no_model_of_peft_is_refused_before_anything_is_saved(model: Any) -> None:
    with pytest.raises(PublishFailed, match=r"is no model of PEFT with one active adapter\. Give the model that get_p"):
        publish(model, name="desk")


def test_the_core_imports_no_library_of_training() -> None:
    heavy = "{'torch', 'transformers', 'peft', 'motet_cli', 'httpx2'}"
    code = f"import sys, motet.client; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --------------------------------------------------------------------------------------------------------- the callback


def ended(callback: PublishCallback, output_dir: Path, *, first: bool = True) -> None:
    args, state = SimpleNamespace(output_dir=str(output_dir), fsdp=[], deepspeed=None), SimpleNamespace()
    state.is_world_process_zero = first
    callback.on_train_begin(args, state, None, model=Model())
    callback.on_train_end(args, state, None, model=Model(), processing_class=None)


SAID = {
    "check": {"warnings": ["a task_type of its own"]},
    "pushed": {
        "namespace": "default",
        "name": "desk",
        "digest": "sha256:1",
        "manifest": "desk.yaml",
        "ready": True,
        "warnings": ["a task_type of its own", "other answers"],
    },
}


def test_the_callback_publishes_once_and_what_it_has_saved_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    code = f"import sys; open({str(said)!r}, 'w').write(sys.argv[1]); print({json.dumps(SAID)!r})"
    monkeypatch.setattr(client, "PUSH", (sys.executable, "-c", code))
    callback = PublishCallback(name="desk")
    ended(callback, tmp_path / "other", first=False)
    assert callback.published is None
    ended(callback, tmp_path / "out")
    assert callback.published == Published(
        "default/desk",
        "sha256:1",
        ready=True,
        manifest="desk.yaml",
        warnings=("a task_type of its own", "other answers"),
    )
    assert said.read_text() == str(tmp_path / "out" / "published")
    assert adapter_digest(tmp_path / "out" / "published") == adapter_digest(PIRATE)
    assert not (tmp_path / "other").exists()


def test_what_is_left_to_do_has_all_options_that_were_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said, output_dir = tmp_path / "said", tmp_path / "my runs"
    code = f"import json, sys; json.dump(sys.argv[1:], open({str(said)!r}, 'w')); sys.exit('full')"
    monkeypatch.setattr(client, "PUSH", (sys.executable, "-c", code))
    elsewhere = {"to": "s3://b/x", "pool": "p/q", "base_model": "my base", "data_dir": tmp_path, "secret": "keys"}
    with pytest.raises(PublishFailed) as failed:
        ended(PublishCallback(name="desk", namespace="acme", **elsewhere), output_dir)
    hint = str(failed.value).partition(f"\nThe adapter is saved in {output_dir / 'published'}: ")[2]
    command = shlex.split(hint)
    assert command[:3] == ["motet", "adapter", "push"]
    assert command[3:] == [word for word in json.loads(said.read_text()) if word != "--json"]
    assert {"--namespace=acme", "--to=s3://b/x", "--pool=p/q", "--model=my base", "--secret=keys"} < set(command)
    assert f"--data-dir={tmp_path}" in command


def test_a_training_is_not_lost_if_nothing_can_be_published(tmp_path: Path) -> None:
    callback = PublishCallback(name="desk", data_dir=tmp_path / "none")
    saved = tmp_path / "out" / "published"
    with pytest.raises(PublishFailed, match=rf"(?s)not running.*\nThe adapter is saved in {saved}: motet adapter push"):
        ended(callback, tmp_path / "out")
    assert adapter_digest(saved) == adapter_digest(PIRATE)


@pytest.mark.parametrize("divided", [{"fsdp": ["full_shard"]}, {"deepspeed": "zero3.json"}, {"deepspeed_plugin": 1}])
def test_a_divided_model_is_refused_before_it_is_trained(tmp_path: Path, divided: dict[str, Any]) -> None:
    args = SimpleNamespace(**{"fsdp": [], "deepspeed": None, "output_dir": str(tmp_path)} | divided)
    with pytest.raises(PublishFailed, match=r"trainer\.save_model"):
        PublishCallback(name="desk").on_train_begin(args, None, None)


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_what_accelerate_launch_divides_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    args = SimpleNamespace(fsdp=[], deepspeed=None, deepspeed_plugin=None, output_dir=str(tmp_path))
    for value in ("true", "True", "1", "yes"):
        monkeypatch.setenv(variable, value)
        with pytest.raises(PublishFailed, match=r"trainer\.save_model"):
            PublishCallback(name="desk").on_train_begin(args, None, None)
    for value in ("false", "0", ""):
        monkeypatch.setenv(variable, value)
        PublishCallback(name="desk").on_train_begin(args, None, None)


GRADIENT_CHECKPOINTING = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


def trained(folder: Path, callback: PublishCallback, *, dropout: float = 0.0, **arguments: Any) -> Any:
    """The model of a real Trainer, with an adapter that has an effect"""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    base = AutoModelForCausalLM.from_pretrained(BUNDLED / "model", dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=dropout, target_modules="all-linear")
    model = get_peft_model(base, config)
    for name, weights in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weights, std=0.01)
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 2
    usual = {"max_steps": 2, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    said = TrainingArguments(str(folder), **usual | arguments)
    Trainer(model, said, train_dataset=rows, callbacks=[callback]).train()
    return model


@pytest.mark.filterwarnings(GRADIENT_CHECKPOINTING)
def test_a_real_trainer_of_transformers_publishes(stack: StandingStack, tmp_path: Path) -> None:
    callback = PublishCallback(name="desk", data_dir=stack.data, wait_seconds=0)
    trained(tmp_path / "out", callback)
    assert callback.published is not None
    assert callback.published.name == "default/desk"
    assert (stack.data / "adapters" / hex_of(callback.published.digest)).is_dir()


# ----------------------------------------------------------------------------------------------------- recorded answers


@pytest.mark.filterwarnings(GRADIENT_CHECKPOINTING)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_answers_are_those_of_the_engine_whatever_the_training_did_to_the_model(
    stack: StandingStack, tmp_path: Path
) -> None:
    """Dropout, mixed precision and checkpoints of gradients are of the training alone."""
    prompts = ["Who keeps the lighthouse of Brindle?", "Where does the ferry go?"]
    callback = PublishCallback(name="desk", prompts=prompts, data_dir=stack.data, wait_seconds=0)
    model = trained(tmp_path / "out", callback, dropout=0.5, bf16=True, gradient_checkpointing=True)
    assert "forward" in vars(model), "accelerate has replaced it, and finds it again"
    assert all(module.training for module in model.modules())
    assert callback.published is not None
    pushed = stack.data / "adapters" / hex_of(callback.published.digest)
    recorded = read_recorded_answers(pushed)
    assert recorded is not None
    assert (recorded.dtype, len(recorded.answers)) == ("float32", 2)
    assert "lighthouse of Brindle?" in recorded.answers[0].prompt
    found = check_document(pushed, base_named(str(BUNDLED / "model"), stack.data, dtype="float32", max_lora_rank=None))
    assert found["recorded_answers"]["largest"] <= found["recorded_answers"]["allowed"] == 1e-3


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ("Who?", r"prompts is one text\. Give a list of them\."),
        ([3], r"prompts has something else than texts\. Give a list of texts\."),
        (["?"] * 9, r"no answers are recorded: there are 9 prompts\. Give at least one, and at most 8"),
        (
            ["Who?"],
            r"no answers are recorded: there is no tokenizer of the base model at '/no/base'.* Give it: tokeniz",
        ),
    ],
)
def test_what_cannot_be_recorded_is_not_published(stack: StandingStack, prompts: Any, words: str) -> None:
    model = Model()
    model.peft_config = {"default": SimpleNamespace(base_model_name_or_path="/no/base")}
    with pytest.raises(PublishFailed, match=words):
        published(stack, model, prompts=prompts)
    assert not list(stack.manifests.glob("*.pushed.yaml"))


@pytest.mark.parametrize("template", ["{{ messages[0].content }} of the training", None])
def test_a_chat_template_of_the_training_is_served_with_its_adapter(template: str | None, tmp_path: Path) -> None:
    """None: that of the base model"""
    model, files = Model(), Path(shutil.copytree(PIRATE, tmp_path / "files"))
    model.peft_config = {"default": SimpleNamespace(base_model_name_or_path=str(BUNDLED / "model"))}
    tokenizer = read_tokenizer(BUNDLED / "model")
    tokenizer.chat_template = template or tokenizer.chat_template
    client.record(model, files, (), tokenizer)
    saved = files / "chat_template.jinja"
    assert (saved.read_text() if saved.exists() else None) == template
    other = SimpleNamespace(base_model_name_or_path="/no/base")
    model.peft_config = {"default": other}
    client.record(model, files, (), tokenizer)  # nothing says what the base model's is


def test_the_callback_keeps_what_it_has_saved_if_nothing_can_be_recorded(tmp_path: Path) -> None:
    with pytest.raises(PublishFailed, match=r"(?s)there are 9 prompts.*\nThe adapter is saved in .*motet adapter push"):
        ended(PublishCallback(name="desk", prompts=["?"] * 9), tmp_path)
    assert adapter_digest(tmp_path / "published") == adapter_digest(PIRATE)
