"""vLLM itself, in the environment of `make peer`: it computes what PEFT and our engine compute."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from motet.domain import BASE, Digest, RequestId
from motet.settings import ProcessSettings
from motet_runner.adapters.certification import certify
from motet_runner.engine_client import EngineClient
from motet_runner.engine_messages import Add, Command, EngineOutputs
from motet_runner.external.engine_start import engine_start
from motet_runner.external.vllm.engine import Engine
from motet_runner.external.vllm.linears import linears_of
from motet_runner.external.vllm.trial import Trial
from motet_runner.interface import EngineConfig, EngineInfo
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


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_compute_what_peft_computes(family: str, tmp_path: Path) -> None:
    base = save_base(family, tmp_path / "base", config=FAMILIES[family]())
    targets = tuple(TARGETS["llama"])
    specs = [dataclasses.replace(one, targets=targets) for one in (*EIGHT, PATTERNS)]
    adapters = {
        Digest(f"sha256:{number}"): save_adapter(base, family, one, tmp_path / str(number), seed=number)
        for number, one in enumerate(specs)
    }
    config = EngineConfig(
        model=base, dtype="float32", kv_cache_mib=4, max_concurrent_sequences=8, max_resident_adapters=3,
        max_lora_rank=32,
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


def test_layers_of_several_kinds_are_found(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    shape = wide(transformers.Gemma2Config, sliding_window=64, layer_types=kinds)
    base = save_base("gemma2", tmp_path / "base", config=shape)
    driven = VllmItself(EngineConfig(model=base, dtype="float32", kv_cache_mib=4, max_concurrent_sequences=8))
    driven.close()
    assert driven.facts.groups == 2


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


class Child:
    """The engine's process as the service starts it"""

    def __init__(self, settings: Settings, folder: Path) -> None:
        command, environment = engine_start(settings)
        config = settings.engine_config(BUNDLED / "model")
        self.client = EngineClient(config, ProcessSettings(data_dir=folder), command, variables() | dict(environment))

    async def answers(self, *commands: Command) -> tuple[EngineInfo, EngineOutputs]:
        """What has come when the first request ends"""
        await self.client.start()
        try:
            async with asyncio.timeout(120):
                info = await self.client.loaded(lambda *_: None)
                for command in commands:
                    self.client.post(command)
                found: list[EngineOutputs] = []
                ended = asyncio.Event()

                def receive(outputs: EngineOutputs) -> None:
                    found.append(outputs)
                    if outputs.ended:
                        ended.set()

                running = asyncio.create_task(self.client.run(receive))
                await ended.wait()
                running.cancel()
        finally:
            await self.client.stop()
        return info, found[-1]


async def test_the_process_serves_what_our_engine_serves(tmp_path: Path) -> None:
    settings = Settings(
        backend="vllm", engine_python=python_of(ENVIRONMENT), dtype="float32", kv_cache_mib=32, max_lora_rank=16
    )
    request = ask("a", prompt=tuple(range(5, 45)), max_tokens=20)
    info, last = await Child(settings, tmp_path).answers(Add(request, 1, 0.0))
    assert [one.request for one in last.ended] == [RequestId("a")]
    ours = make_engine(BUNDLED / "model", dtype="float32", max_model_length=512)
    assert info.target_modules == ours.info.target_modules
    assert (info.eos_token_ids, info.vocabulary) == (ours.info.eos_token_ids, ours.info.vocabulary)
    assert last.ended[0].output_tokens == len(run(ours, request).tokens["a"])
