"""What a start finds out about a vLLM that does not do what the plan relies on."""

import json
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from safetensors import SafetensorError

from motet.errors import ModelFolderError
from motet_runner.external.vllm.driven import Ask, Penalties, Produced
from motet_runner.external.vllm.trial import Trial
from motet_runner.interface import EngineConfig, Logprobs
from testbed.tree import ROOT
from tests.runner.external.fake_driven import FakeDriven, facts, load_vllm_with
from tests.runner.families import WRAPPED

GEMMA = WRAPPED[0]
LINEARS = {f"model.layers.{layer}.{kind}": (16, 32) for layer in range(2) for kind in ("q_proj", "up_proj", "router")}
WITHOUT = Logprobs(-0.5, ((7, -0.5), (8, -2.0)))
WITH = Logprobs(-0.1, ((9, -0.1), (7, -3.0)))
MODEL = ROOT / "cli" / "motet_cli" / "bundled" / "model"


@dataclass
class Tried(FakeDriven):
    idle: tuple[str, ...] = ()
    """Kinds whose adapters change nothing"""
    raises: tuple[str, ...] = ()
    leaks: bool = False
    """Rows of the base model get the adapter of the rows beside them."""
    forgets: bool = False
    """A request that begins with the tokens of an earlier one goes on otherwise."""
    ignores: str = ""
    """What its logits processor does not do"""
    reads_masks_of_new_requests: bool = False
    """And not in the other iterations"""
    max_rank: int = 16
    error: Exception = field(default_factory=lambda: ValueError("unsupported"))
    """Of the kinds for which it raises"""
    miscounts: dict[int, int] = field(default_factory=dict)
    """Blocks in use -> what it says"""
    keeps_blocks: bool = False
    """Of requests that were aborted"""
    kinds: dict[int, list[str]] = field(default_factory=dict)

    def allow(self, name: str, allowed: bytes) -> None:
        (request,) = [one for one in self.running.values() if one.ask.name == name]
        too_late = self.reads_masks_of_new_requests and len(request.tokens) > len(request.ask.tokens)
        if self.ignores != "masks" and not too_late:
            super().allow(name, allowed)

    def load_adapter(self, number: int, folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        kinds = config["target_modules"]
        if set(kinds) & set(self.raises) or config["r"] > self.max_rank:
            raise self.error
        super().load_adapter(number, folder)
        self.kinds[number] = kinds

    def step(self) -> list[Produced]:
        beside = [one.ask.adapter for one in self.running.values() if one.ask.adapter]
        made = super().step()
        return [replace_logprobs(one, WITH) for one in made] if self.leaks and beside else made

    def blocks_in_use(self) -> int:
        blocks = super().blocks_in_use() + self.keeps_blocks * len(self.aborted)
        return self.miscounts.get(blocks, blocks)

    def logprobs_of(self, ask: Ask) -> Logprobs:
        changed = set(self.kinds.get(ask.adapter, ())) - set(self.idle)
        return WITH if changed else WITHOUT

    def add(self, ask: Ask) -> None:
        if self.ignores == "masks":
            ask = ask._replace(masked=False)
        elif self.ignores == "penalties":
            ask = ask._replace(penalties=Penalties())
        again = (
            self.forgets
            and not ask.output_tokens
            and any(ask.tokens[: len(one.tokens)] == one.tokens for one in self.asked)
        )
        super().add(ask._replace(tokens=[*ask.tokens[:-1], 0]) if again and self.aborted else ask)


def replace_logprobs(one: Produced, logprobs: Logprobs) -> Produced:
    return one._replace(logprobs=logprobs)


def test_linears_that_an_adapter_changes_are_targets() -> None:
    driven = Tried()
    assert Trial(driven, LINEARS, 16).run() == LINEARS
    assert not driven.adapters
    assert not driven.running


def test_kinds_that_are_refused_or_dropped_are_no_targets() -> None:
    found = Trial(Tried(idle=("up_proj",), raises=("router",)), LINEARS, 16).run()
    assert sorted(found) == ["model.layers.0.q_proj", "model.layers.1.q_proj"]


def test_a_model_that_vllm_does_not_adapt_serves_its_base() -> None:
    assert Trial(Tried(raises=("q_proj", "up_proj", "router")), LINEARS, 16).run() == {}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 9 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        OSError(28, "No space left on device"),
        SafetensorError("I/O error"),
    ],
    ids=str,
)
def test_an_error_that_is_of_no_kind_of_linear_ends_the_start(error: Exception) -> None:
    with pytest.raises(type(error)) as ended:
        Trial(Tried(raises=("up_proj",), error=error), LINEARS, 16).run()
    assert ended.value is error


def test_a_start_that_lacks_memory_names_the_fields_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = Tried(raises=("up_proj",), error=MemoryError())
    load = load_vllm_with(lambda _: lacks, monkeypatch)
    fields = r"engine\.maxResidentAdapters, engine\.maxLoraRank or engine\.kvCacheMiB"
    with pytest.raises(ModelFolderError, match=rf"^vLLM cannot serve .*: MemoryError\. Lower {fields}\.$"):
        load(EngineConfig(model=MODEL, kv_cache_mib=64))


def test_ends_that_only_the_text_model_inside_has_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    GEMMA.config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text()) | {"eos_token_id": None}
    raw["text_config"]["eos_token_id"] = [7, 3]
    path.write_text(json.dumps(raw))
    load = load_vllm_with(lambda _: Tried(), monkeypatch)
    assert load(EngineConfig(model=tmp_path)).info.eos_token_ids == (3, 7)


def test_a_disk_without_room_does_not_mean_that_nothing_is_adapted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    with pytest.raises(FileNotFoundError):
        Trial(Tried(), LINEARS, 16).run()


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_its_adapters_have_a_rank_that_the_engine_takes(rank: int) -> None:
    assert Trial(Tried(max_rank=rank), LINEARS, rank).run() == LINEARS


def test_an_adapter_that_reaches_requests_for_the_base_is_found() -> None:
    with pytest.raises(ModelFolderError, match="applies an adapter to requests for the base model beside it"):
        Trial(Tried(leaks=True), LINEARS, 16).run()


def test_an_answer_that_does_not_go_on_with_the_same_tokens_is_found() -> None:
    with pytest.raises(ModelFolderError, match="other tokens after a request was aborted"):
        Trial(Tried(forgets=True), LINEARS, 16).run()


@pytest.mark.parametrize("ignored", ["masks", "penalties"])
def test_a_vllm_that_ignores_the_logits_processor_is_found(ignored: str) -> None:
    with pytest.raises(ModelFolderError, match="does not draw from the logits"):
        Trial(Tried(ignores=ignored), LINEARS, 16).run()


def test_a_vllm_that_reads_masks_with_new_requests_alone_is_found() -> None:
    with pytest.raises(ModelFolderError, match="read each mask"):
        Trial(Tried(reads_masks_of_new_requests=True), LINEARS, 16).run()


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ({"miscounts": {0: 1}}, "1 of its blocks in use for 0 tokens, and Motet counts 0"),
        ({"miscounts": {1: 2}}, "2 of its blocks in use for 16 tokens, and Motet counts 1"),
        ({"miscounts": {2: 1}}, "1 of its blocks in use for 17 tokens, and Motet counts 2"),
        ({"keeps_blocks": True}, "1 of its blocks in use for 0 tokens"),
        ({"facts": facts(block_tokens=128), "miscounts": {1: 2}}, "2 of its blocks in use for 128 tokens"),
    ],
)
def test_blocks_that_are_not_as_the_plan_counts_pages_are_found(does: dict[str, object], said: str) -> None:
    with pytest.raises(ModelFolderError, match=f"^This vLLM has {said}"):
        Trial(Tried(**does), LINEARS, 16).run()


@pytest.mark.parametrize(
    ("says", "said"),
    [
        ({"groups": 2}, "FakeForCausalLM has layers of 2 kinds"),
        ({"blocks": 0, "block_tokens": 32}, r"holds no block of 32 tokens\. Raise engine\.kvCacheMiB"),
        ({"shares_prefixes": False}, "no prefix cache for FakeForCausalLM"),
    ],
)
def test_a_model_that_the_plan_cannot_count_is_refused_before_anything_is_tried(
    says: dict[str, object], said: str
) -> None:
    driven = Tried(facts(**says))
    with pytest.raises(ModelFolderError, match=said):
        Trial(driven, LINEARS, 16).run()
    assert not driven.asked


def test_prompts_may_take_several_iterations() -> None:
    assert Trial(Tried(budget=10), LINEARS, 16).run() == LINEARS


def test_the_numbers_of_its_adapters_come_never_again() -> None:
    driven = Tried()
    Trial(driven, LINEARS, 16).run()
    assert min(driven.kinds) > 1_000_000


def test_shorter_numbers_may_differ_a_little_in_another_batch() -> None:
    driven = Tried(forgets=True)
    driven.facts = replace(driven.facts, dtype="bfloat16")
    assert Trial(driven, LINEARS, 16).run() == LINEARS
