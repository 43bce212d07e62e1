"""vLLM itself, in the environment of `make peer`: it computes what PEFT and our engine compute."""

import asyncio
import dataclasses
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from motet.api.v1 import runner_pb2
from motet.domain import BASE, Digest, RequestId
from motet.errors import AdapterUnproved, ModelFolderError
from motet.grammars.grammar import Grammar, GrammarForm
from motet.settings import ProcessSettings
from motet_runner.adapters.certification import certify
from motet_runner.adapters.proof import Proof, ProofOrder
from motet_runner.answer_recording import Recording, record
from motet_runner.engine_client import EngineClient, EngineDied
from motet_runner.engine_messages import Add, Command, EngineOutputs, SequenceEnded
from motet_runner.external.engine_start import engine_start
from motet_runner.external.vllm.driven import Ask
from motet_runner.external.vllm.engine import Engine
from motet_runner.external.vllm.linears import linears_of
from motet_runner.external.vllm.plain_adapter import write_plain
from motet_runner.external.vllm.trial import Trial
from motet_runner.external.vllm.workers import SHARED, shared_by
from motet_runner.interface import EngineConfig, EngineInfo, Finish, NewSequence, ProofEnded
from motet_runner.settings import Settings
from testbed.tree import ROOT
from tests.runner.engines import ask, make_engine, run
from tests.runner.external.vllm_itself import ENVIRONMENT, VllmItself, needs_vllm, variables
from tests.runner.peft_reference import Served, World, reference_logits
from tests.runner.random_models import EIGHT, ENDS, TARGETS, VOCABULARY, RandomAdapter, save_adapter, save_base
from tools.peers.environment import python_of

pytestmark = [
    pytest.mark.soak,
    needs_vllm,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
BUNDLED = ROOT / "cli" / "motet_cli" / "bundled"
TOKENS = 12
NOTICED_SECONDS = 1.0
"""On a machine that computes nothing else"""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["sea", "land"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarForm.JSON_SCHEMA, json.dumps(SCHEMA))
WORD = Grammar(GrammarForm.REGEX, "(yes|no|perhaps)[.!]")
PATTERNS = RandomAdapter(8, 16, rank_pattern=((r"q_proj", 2), (r"layers\.1\.mlp\.down_proj", 5)))


def wide(make: Callable[..., transformers.PreTrainedConfig], **more: object) -> transformers.PreTrainedConfig:
    """Heads of 32 numbers: vLLM has no attention for fewer on a CPU."""
    return make(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        **(ENDS | more),
    )


FAMILIES = {
    "llama": lambda: wide(transformers.LlamaConfig),
    "qwen2": lambda: wide(transformers.Qwen2Config),
    "qwen3": lambda: wide(transformers.Qwen3Config),
    "gemma": lambda: wide(transformers.GemmaConfig),
}


@pytest.mark.parametrize(
    ("family", "workers"), [*((family, 1) for family in FAMILIES), ("llama", 2)], ids=[*FAMILIES, "llama-on-two"]
)
def test_adapters_compute_what_peft_computes(family: str, workers: int, tmp_path: Path) -> None:
    config = FAMILIES[family]()
    config.num_key_value_heads = workers
    base = save_base(family, tmp_path / "base", config=config)
    targets = tuple(TARGETS["llama"])
    specs = [dataclasses.replace(one, targets=targets) for one in (*EIGHT, PATTERNS)]
    adapters = {
        Digest(f"sha256:{number}"): save_adapter(base, family, one, tmp_path / str(number), seed=number)
        for number, one in enumerate(specs)
    }
    config = EngineConfig(
        model=base, dtype="float32", kv_cache_mib=4, max_concurrent_sequences=8, max_resident_adapters=3,
        max_lora_rank=32, tensor_parallel=workers,
    )  # fmt: skip
    driven = VllmItself(config)
    try:
        linears = Trial(driven, linears_of(base), config.max_lora_rank).run()
        assert linears == linears_of(base)
        engine = Engine(
            config, driven, target_modules=linears, eos_token_ids=(ENDS["eos_token_id"],), clock=time.perf_counter
        )
        for digest, folder in adapters.items():
            engine.load_adapter(digest, certify(folder, engine.info).layout)
        voices = [BASE, *adapters]
        prompts = [tuple(2 + (7 * n + 3 * place) % 500 for place in range(5 + 13 * n)) for n in range(len(voices))]
        requests = [
            ask(f"r{n}", prompt=prompts[n], adapter=voice, max_tokens=TOKENS, logprobs=True)
            for n, voice in enumerate(voices)
        ]
        ran = run(engine, *requests)
    finally:
        driven.close()
    served = [Served(one.request, one.adapter, one.prompt, ran.tokens[one.request]) for one in requests]
    expected = reference_logits(World(family, base, adapters), served)
    for one in served:
        logs = expected[one.request].log_softmax(-1)
        theirs = logs.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        ours = [given.logprob for output in ran.outputs if output.request == one.request for given in output.logprobs]
        torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-4, rtol=0)
        assert float((logs.max(1).values - theirs).max()) <= 1e-4, "it takes the likeliest token"


def quantise(base: Path, bits: int) -> None:
    """The linears in 4 bits, with a scale for each 32 inputs of an output; or in 8 bits with one for each output, and
    each token's inputs in 8 bits too"""
    weights = load_file(base / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")]:
        whole = weights.pop(name)
        groups = whole.view(len(whole), -1, 32 if bits == 4 else whole.shape[1])
        scale = groups.abs().amax(2, keepdim=True).clamp(min=1e-6) / (2 ** (bits - 1) - 1)
        numbers = (groups / scale).round().view(len(whole), -1)
        weights[f"{name}_scale"] = scale.squeeze(2).contiguous()
        if bits == 8:
            weights[name] = numbers.to(torch.int8)
            continue
        packed = ((numbers + 8).long().view(len(whole), -1, 8) << torch.arange(0, 32, 4)).sum(2)
        weights[f"{name}_packed"] = packed.where(packed < 1 << 31, packed - (1 << 32)).int()
        weights[f"{name}_shape"] = torch.tensor(whole.shape)
    save_file(weights, base / "model.safetensors")
    of_both = {"num_bits": bits, "type": "int", "symmetric": True}
    grouped = {"strategy": "group", "group_size": 32} if bits == 4 else {"strategy": "channel"}
    inputs = None if bits == 4 else of_both | {"strategy": "token", "dynamic": True}
    kind = {"targets": ["Linear"], "weights": of_both | grouped | {"dynamic": False}, "input_activations": inputs}
    raw = json.loads((base / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if bits == 4 else "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": kind},
    }
    (base / "config.json").write_text(json.dumps(raw))


AMX = "amx_int8" in Path("/proc/cpuinfo").read_text()


async def test_a_base_in_eight_bits_is_refused_in_one_line_where_vllm_cannot_adapt_it(tmp_path: Path) -> None:
    """vLLM loads one on any CPU. Without AMX, it gives the weights of its linears away, and looks for them later."""
    base = save_base("llama", tmp_path / "base", config=FAMILIES["llama"]())
    quantise(base, 8)
    client = Child(Settings(backend="vllm", engine_python=python_of(ENVIRONMENT)), tmp_path, base).client
    await client.start()
    refused = ""
    try:
        async with asyncio.timeout(120):
            await client.loaded(lambda *_: None)
    except ModelFolderError as error:
        refused = str(error)
    finally:
        await client.stop()
    assert bool(refused) != AMX
    said = r"vLLM cannot serve \S+ \(quantised; not all builds .+ that\): .*'device'\. Change model\.uri\."
    assert AMX or re.fullmatch(said, refused)


@pytest.mark.parametrize("bits", [4, *([8] if AMX else [])])
def test_a_quantised_base_answers_as_vllm_alone(bits: int, tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", config=FAMILIES["llama"]())
    spec = dataclasses.replace(EIGHT[0], targets=tuple(TARGETS["llama"]))
    adapter = save_adapter(base, "llama", spec, tmp_path / "adapter", seed=1)
    quantise(base, bits)
    digest = Digest("sha256:1")
    prompts = [tuple(2 + (7 * n + 3 * place) % 500 for place in range(5 + 13 * n)) for n in range(6)]
    config = EngineConfig(
        model=base, dtype="bfloat16", kv_cache_mib=4, max_concurrent_sequences=8, max_resident_adapters=1,
        max_lora_rank=16,
    )  # fmt: skip
    driven = VllmItself(config)
    try:
        linears = Trial(driven, linears_of(base), config.max_lora_rank).run()
        assert linears == linears_of(base)
        engine = Engine(config, driven, target_modules=linears, eos_token_ids=(1,), clock=time.perf_counter)
        engine.load_adapter(digest, certify(adapter, engine.info).layout)
        run(engine, ask("first", adapter=digest))  # so that it is there when the others begin
        voices = [digest if n % 2 else BASE for n in range(len(prompts))]
        ran = run(engine, *(ask(f"r{n}", prompt=prompts[n], adapter=voices[n], max_tokens=40) for n in range(6)))
    finally:
        driven.close()
    requests = [(prompt, n % 2) for n, prompt in enumerate(prompts)]
    alone = subprocess.run(
        [python_of(ENVIRONMENT), "-P", Path(__file__).with_name("generate_process.py")],
        env=variables(),
        input=pickle.dumps((str(base), {1: str(adapter)}, requests, 40)),
        capture_output=True,
        check=True,
    )
    assert [ran.tokens[f"r{n}"] for n in range(6)] == pickle.loads(alone.stdout)


def test_layers_of_several_kinds_are_found(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    shape = wide(transformers.Gemma2Config, sliding_window=64, layer_types=kinds)
    base = save_base("gemma2", tmp_path / "base", config=shape)
    driven = VllmItself(EngineConfig(model=base, dtype="float32", kv_cache_mib=4, max_concurrent_sequences=8))
    driven.close()
    assert driven.facts.groups == 2


def test_what_vllm_stops_by_itself_is_counted(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", config=FAMILIES["llama"]())
    config = EngineConfig(model=base, dtype="float32", kv_cache_mib=1, max_concurrent_sequences=64)
    driven = VllmItself(config)
    try:
        options = {"max_tokens": 400, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        for number in range(driven.facts.blocks):  # no plan asks for this
            driven.add(Ask(str(number), (5, 6, 7), options, 0, "salt"))
        assert driven.step()
        assert driven.stops() == 0
        for _ in range(100):
            driven.step()
        assert driven.stops() > 0
    finally:
        driven.close()


class Recorded:
    """What a vLLM is asked to stop"""

    def __init__(self, driven: VllmItself) -> None:
        self._driven = driven
        self.aborted: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._driven, name)

    def abort(self, names: list[str]) -> None:
        self.aborted += names
        self._driven.abort(names)


def test_without_a_shared_prefix_cache_a_long_prompt_stops_no_other_row(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", config=FAMILIES["llama"]())
    config = EngineConfig(
        model=base, dtype="float32", kv_cache_mib=4, max_concurrent_sequences=4, prefill_chunk_tokens=32,
        prefix_cache=False,
    )  # fmt: skip
    driven = Recorded(VllmItself(config))
    try:
        engine = Engine(config, driven, target_modules={}, eos_token_ids=(1,), clock=time.perf_counter)
        ran = run(engine, *(ask(f"r{n}", prompt=100, tenant="x") for n in range(3)), steps=30)
        run(engine, ask("long", prompt=400, tenant="x"), ran=ran)
    finally:
        driven.close()
    assert driven.aborted == []
    assert {name: len(tokens) for name, tokens in ran.tokens.items()} == dict.fromkeys(["r0", "r1", "r2", "long"], 40)


def test_the_memory_for_kv_is_the_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    base = save_base("llama", tmp_path / "base", config=FAMILIES["llama"]())
    driven = VllmItself(EngineConfig(model=base, dtype="float32", kv_cache_mib=4, max_concurrent_sequences=8))
    driven.close()
    page_bytes = driven.facts.bytes_per_token * driven.facts.block_tokens
    assert (driven.facts.blocks + 1) * page_bytes <= 4 << 20


def test_only_linears_that_adapters_may_have_are_adapted(tmp_path: Path) -> None:
    """vLLM would else compute an adapter's part of the head in each iteration, also where there is none."""
    base = save_base("llama", tmp_path / "base", config=FAMILIES["llama"]())
    driven = VllmItself(EngineConfig(model=base, dtype="float32", kv_cache_mib=4, max_concurrent_sequences=8))
    try:
        write_plain({"lm_head": (torch.ones(4, 64), torch.arange(4.0 * VOCABULARY).view(VOCABULARY, 4))}, 4, tmp_path)
        driven.load_adapter(1, tmp_path)
        for adapter in (0, 1):
            driven.add(
                Ask(
                    str(adapter),
                    range(2, 20),
                    {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
                    adapter,
                    "salt",
                )
            )
        plain, with_head = driven.step()
        assert (plain.name, with_head.name) == ("0", "1")
        assert plain.token == with_head.token
    finally:
        driven.close()


def test_an_option_that_vllm_refuses_ends_nothing(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", config=FAMILIES["llama"]())
    driven = VllmItself(EngineConfig(model=base, dtype="float32", kv_cache_mib=4, max_concurrent_sequences=8))
    try:
        with pytest.raises(RuntimeError, match="temperature must be in"):
            driven.check({"temperature": 2.5})
        with pytest.raises(RuntimeError, match="out-of-vocab"):
            driven.check({"stop_token_ids": [driven.facts.vocabulary]})
        driven.check({"temperature": 2.0})
        assert driven.step() == []
    finally:
        driven.close()


CHANGED = {
    "a schema": {"grammar": JSON, "max_tokens": 120},
    "a word": {"grammar": WORD},
    "a schema, delivered": {"grammar": JSON, "max_tokens": 120, "moves": True},
    "listed": {"allowed_token_ids": frozenset(range(300, 340))},
    "bad words": {"bad_words": ((300,), (301, 302), (40, 41))},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9, "moves": True},
    "reward": {"frequency_penalty": -0.5, "presence_penalty": -0.2},
    "both penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "repetition below 1": {"presence_penalty": 0.7, "repetition_penalty": 0.8, "moves": True},
    "all": {"grammar": JSON, "max_tokens": 120, "presence_penalty": 0.5, "repetition_penalty": 1.2, "moves": True},
    "plain": {},
}


@pytest.mark.parametrize("workers", [1, 2])
def test_greedy_answers_with_masks_and_penalties_are_ours(workers: int) -> None:
    model = BUNDLED / "model"
    config = EngineConfig(
        model=model, dtype="float32", kv_cache_mib=32, max_concurrent_sequences=16, max_model_length=512,
        tensor_parallel=workers,
    )  # fmt: skip

    def asked(number: int, what: str, delivered: tuple[int, ...] = ()) -> NewSequence:
        changed = {"max_tokens": 60, "ignore_eos": False} | CHANGED[what]
        grammar = changed.pop("grammar", None)
        changed.pop("moves", None)
        prompt = tuple(5 + (n * 37 + number * 11) % 1500 for n in range(30))
        return replace(ask(what, prompt=prompt, delivered=delivered, **changed), grammar=grammar)

    ours = run(make_engine(model, dtype="float32", kv_cache_mib=32), *(asked(*one) for one in enumerate(CHANGED)))
    known = {what: len(ours.tokens[what]) // 2 * ("moves" in CHANGED[what]) for what in CHANGED}
    driven = VllmItself(config)
    try:
        engine = Engine(config, driven, target_modules={}, eos_token_ids=(1,), clock=time.perf_counter)
        moved = [asked(n, what, tuple(ours.tokens[what][: known[what]])) for n, what in enumerate(CHANGED)]
        theirs = run(engine, *moved)
    finally:
        driven.close()
    for what, tokens in ours.tokens.items():
        assert theirs.tokens[what] == tokens[known[what] :], what


@dataclasses.dataclass
class Heard:
    info: EngineInfo
    tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    ended: dict[str, SequenceEnded] = dataclasses.field(default_factory=dict)

    def take(self, outputs: EngineOutputs) -> None:
        for encoded in outputs.steps.values():
            for one in runner_pb2.GenerateDown.FromString(encoded).step.sequences:
                self.tokens.setdefault(one.request, []).extend(one.tokens)
        self.ended |= {one.request: one for one in outputs.ended}


class Child:
    """The engine's process as the service starts it"""

    def __init__(self, settings: Settings, folder: Path, model: Path = BUNDLED / "model") -> None:
        command, environment = engine_start(settings)
        config = settings.engine_config(model)
        self.client = EngineClient(config, ProcessSettings(data_dir=folder), command, variables() | dict(environment))

    async def heard(self, *commands: Command, until: Callable[[Heard], bool], kill: bool = False) -> Heard:
        """What has come when enough has come. Then the process ends, or is killed."""
        await self.client.start()
        try:
            async with asyncio.timeout(120):
                heard = Heard(await self.client.loaded(lambda *_: None))
                for command in commands:
                    self.client.post(command)
                enough = asyncio.Event()

                def receive(outputs: EngineOutputs) -> None:
                    heard.take(outputs)
                    if until(heard):
                        enough.set()

                running = asyncio.create_task(self.client.run(receive))
                await enough.wait()
                running.cancel()
                if kill:
                    os.kill(self.client.pid, signal.SIGKILL)
        finally:
            await self.client.stop()
        return heard


def test_what_a_cpu_does_not_compute_is_named(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base", config=FAMILIES["llama"]())
    for option, field in (
        ({"stages": 2}, r"engine\.parallel\.stages is 2"),
        ({"kv_cache_dtype": "bfloat16"}, r"engine\.vllm\.kvCacheDtype is bfloat16"),
        ({"attention_backend": "FLASHINFER"}, r"engine\.vllm\.attentionBackend is FLASHINFER"),
        ({"tensor_parallel": 64}, r"engine\.parallel has 64 workers"),
    ):
        with pytest.raises(RuntimeError, match=field):
            VllmItself(EngineConfig(model=base, dtype="float32", kv_cache_mib=4, **option))


async def test_keys_and_values_of_fewer_bits_are_more_pages(tmp_path: Path) -> None:
    usual = {"backend": "vllm", "engine_python": python_of(ENVIRONMENT), "kv_cache_mib": 32, "max_lora_rank": 16}
    request = ask("a", prompt=tuple(range(5, 45)), max_tokens=20)
    pages = {}
    for dtype in ("auto", "fp8"):
        settings = Settings(**usual, kv_cache_dtype=dtype, dtype="bfloat16", enforce_eager=True)
        heard = await Child(settings, tmp_path).heard(Add(request, 1, 0.0), until=lambda heard: "a" in heard.ended)
        info = heard.info
        assert heard.ended["a"].output_tokens > 0
        pages[dtype] = info.pages, info.page_bytes
        assert info.pages * info.page_bytes <= 32 << 20
    assert pages["fp8"][1] * 2 == pages["auto"][1]
    assert pages["fp8"][0] > 1.9 * pages["auto"][0]


def processes_below(pid: int) -> set[int]:
    found = set()
    for children in Path("/proc", str(pid), "task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found |= {child, *processes_below(child)}
    return found


def alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("killed", ["worker", "process", "service"])
async def test_several_workers_end_together_and_leave_nothing(killed: str, busy: bool, tmp_path: Path) -> None:
    settings = Settings(
        backend="vllm", engine_python=python_of(ENVIRONMENT), dtype="float32", kv_cache_mib=64, max_lora_rank=16,
        tensor_parallel=2,
    )  # fmt: skip
    client = Child(settings, tmp_path).client
    await client.start()
    try:
        async with asyncio.timeout(400):
            await client.loaded(lambda *_: None)
        below = processes_below(client.pid)
        workers = {one for one in below if b"VLLM::Worker" in Path("/proc", str(one), "cmdline").read_bytes()}
        assert len(workers) == 2
        if busy:
            for number in range(32):
                client.post(Add(ask(f"r{number}", prompt=1000, max_tokens=1000), 1, 0.0))
            await asyncio.sleep(1)
        shared = [SHARED / one for one in shared_by([client.pid, *below])]
        assert shared
        running = asyncio.create_task(client.run(lambda _: None))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        if killed == "service":  # its end of the pipe closes
            running.cancel()
            await client.stop()
            assert time.monotonic() - began < 10
        else:
            os.kill(min(workers) if killed == "worker" else client.pid, signal.SIGKILL)
            with pytest.raises(EngineDied):
                await running
            others = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
            assert time.monotonic() - began <= NOTICED_SECONDS * others  # vLLM itself would wait for ever
        while any(map(alive, {client.pid, *below})) or any(one.exists() for one in shared):
            assert time.monotonic() - began < 20, [one.name for one in shared if one.exists()]
            await asyncio.sleep(0.05)
    finally:
        await client.stop()


async def test_the_process_serves_what_our_engine_serves(tmp_path: Path) -> None:
    settings = Settings(
        backend="vllm", engine_python=python_of(ENVIRONMENT), dtype="float32", kv_cache_mib=32, max_lora_rank=16
    )
    request = ask("a", prompt=tuple(range(5, 45)), max_tokens=20)
    heard = await Child(settings, tmp_path).heard(Add(request, 1, 0.0), until=lambda heard: bool(heard.ended))
    ours = make_engine(BUNDLED / "model", dtype="float32", max_model_length=512)
    info = heard.info
    assert info.target_modules == ours.info.target_modules
    assert (info.eos_token_ids, info.vocabulary) == (ours.info.eos_token_ids, ours.info.vocabulary)
    assert heard.tokens == run(ours, request).tokens


async def test_json_stays_valid_when_its_answer_moves_from_a_killed_process(tmp_path: Path) -> None:
    """To another one with vLLM, and to one with our engine, with masks of one version of one grammar"""
    settings = Settings(
        backend="vllm", engine_python=python_of(ENVIRONMENT), dtype="float32", kv_cache_mib=32, max_lora_rank=16
    )
    asked = [
        replace(
            ask(f"r{n}", prompt=(*range(20, 60), n), max_tokens=200, ignore_eos=False, temperature=n % 4 / 2),
            grammar=JSON,
            seed=n,
        )
        for n in range(16)
    ]
    first = await Child(settings, tmp_path).heard(
        *(Add(one, 1, 0.0) for one in asked),
        until=lambda heard: sum(len(tokens) > 6 for tokens in heard.tokens.values()) == len(asked),
        kill=True,
    )
    moved = [replace(one, epoch=2, delivered=tuple(first.tokens[one.request])) for one in asked]
    left = [one for one in moved if one.request not in first.ended]
    assert len(left) > len(asked) // 2
    second = await Child(settings, tmp_path).heard(
        *(Add(one, 1, 0.0) for one in left), until=lambda heard: len(heard.ended) == len(left)
    )
    ours = run(make_engine(BUNDLED / "model", dtype="float32", kv_cache_mib=32, max_model_length=512), *left)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "model" / "tokenizer.json"))
    valid = Draft202012Validator(SCHEMA)
    texts = [
        tokenizer.decode([*one.delivered, *tokens[one.request]])
        for tokens in (second.tokens, ours.tokens)
        for one in left
    ]
    assert all(valid.is_valid(json.loads(text)) for text in texts)
    assert all(second.ended[one.request].finish is Finish.STOP for one in left)
    greedy = [one.request for one in left if not one.sampling.temperature]
    assert [second.tokens[one] for one in greedy] == [ours.tokens[one] for one in greedy]


def test_both_processors_leave_the_same() -> None:
    """vLLM loads both. The second one's model runner computes on GPUs alone: it is driven on a CPU's tensors."""
    script = Path(__file__).with_name("processors_process.py")
    done = subprocess.run(
        [python_of(ENVIRONMENT), "-P", script], env=variables(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 1000


# -------------------------------------------------------------------------------------------------------------- proofs


@pytest.fixture(scope="module")
def pirate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled adapter, with its answers as PEFT has computed them"""
    folder = Path(shutil.copytree(BUNDLED / "adapters" / "pirate", tmp_path_factory.mktemp("pirate") / "pirate"))
    record(Recording(folder, BUNDLED / "model"))
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_an_adapter_is_proved_by_what_peft_has_recorded(workers: int, pirate: Path, tmp_path: Path) -> None:
    other, small = (Path(shutil.copytree(pirate, tmp_path / name)) for name in ("other", "small"))
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
    tensors = load_file(small / "adapter_model.safetensors")
    halves = {name: tensor * 1e-20 if "lora_B" in name else tensor for name, tensor in tensors.items()}
    save_file(halves, small / "adapter_model.safetensors")
    model = EngineConfig(
        model=BUNDLED / "model", dtype="float32", kv_cache_mib=32, max_concurrent_sequences=4, max_model_length=512,
        tensor_parallel=workers, prove_adapters=None,
    )  # fmt: skip
    driven = VllmItself(model)
    try:
        engine = Engine(
            model, driven, target_modules=linears_of(model.model), eos_token_ids=(1,), clock=time.perf_counter
        )
        assert engine.info.proves
        requests = [ask(f"r{number}", prompt=tuple(range(5, 60)), max_tokens=200) for number in range(3)]
        alone = run(engine, *requests).tokens
        beside = run(engine, *(replace(one, request=RequestId(f"{one.request} beside")) for one in requests), steps=5)
        for number, folder in enumerate((pirate, other, small), 1):
            layout = certify(folder, engine.info).layout
            order = ProofOrder(number, recorded=folder != small)
            engine.load_adapter(Digest(f"sha256:{number}"), layout, proof=order)
        run(engine, ran=beside)
    finally:
        driven.close()
    found = {ended.number: ended.found for ended in beside.of(ProofEnded)}
    assert isinstance(found[1], Proof), found
    assert found[1].recorded is not None
    assert found[1].recorded.agrees, found[1]
    assert not found[1].warnings
    assert isinstance(found[2], Proof), found
    assert found[2].recorded is not None
    assert found[2].recorded.wrong, found[2]
    assert isinstance(found[3], AdapterUnproved), found
    assert [beside.tokens[f"r{number} beside"] for number in range(3)] == [alone[f"r{number}"] for number in range(3)]
