"""The engine against transformers + PEFT, one adapter at a time: the same tokens, near ties of the reference aside.

`peft_reference.py` says what the same is.
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from motet.domain import BASE, PAGE_TOKENS, Digest, RequestId, pages_for
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, NewSequence, Sampling
from testbed.compiled_kernels import CACHE, needs_a_compiler
from tests.runner.engines import PLAN_AHEAD, device_of, load
from tests.runner.peft_reference import Served, World, assert_equal, reference_logits
from tests.runner.random_models import EIGHT, VOCABULARY, save_adapter, save_base

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SEQUENCES = 32
DECODED = 36


@pytest.fixture(scope="module", params=["llama", "gpt2", "gpt_neox"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    base = save_base(family, folder / "base")
    adapters = {
        Digest(f"sha256:{index}"): save_adapter(base, family, spec, folder / f"adapter-{index}", seed=index)
        for index, spec in enumerate(EIGHT)
    }
    return World(family, base, adapters)


def prompts() -> Iterator[tuple[int, ...]]:
    """Of 3 to 90 tokens, so that prompts end anywhere in a page and some need several chunks."""
    generator = torch.Generator().manual_seed(5)
    for index in count():
        length = 3 + (index * 37) % 88
        yield tuple(torch.randint(2, VOCABULARY, (length,), generator=generator).tolist())


def serve(world: World, config: EngineConfig) -> tuple[list[Served], Engine]:
    """32 sequences over nine adapters and the base, a few more every other iteration; logits are kept as they come."""
    by_request: dict[RequestId, Served] = {}

    def keep(requests: list[RequestId], logits: torch.Tensor) -> None:
        for request, row in zip(requests, logits, strict=True):
            by_request[request].logits.append(row.clone())

    engine = Engine(config, on_logits=keep)
    for digest, folder in world.adapters.items():
        load(engine, digest, folder)
    voices = [BASE, *world.adapters]
    waiting = [
        Served(RequestId(f"r{i}"), voices[i % len(voices)], prompt, [], [])
        for i, prompt in zip(range(SEQUENCES), prompts(), strict=False)
    ]
    by_request |= {served.request: served for served in waiting}
    served = list(waiting)
    while waiting or engine.has_work():
        for _ in range(3):
            if waiting:
                new = waiting.pop(0)
                engine.add(
                    NewSequence(
                        request=new.request,
                        epoch=1,
                        prompt=new.prompt,
                        adapter=new.adapter,
                        promise=pages_for(len(new.prompt) + DECODED, PAGE_TOKENS),
                        sampling=Sampling(max_tokens=DECODED, ignore_eos=True),
                    )
                )
        for output in engine.step().sequences:
            assert output.error is None
            of_request = by_request[output.request]
            assert output.index == len(of_request.tokens)
            of_request.tokens += output.tokens
        engine.check()
    return served, engine


@pytest.mark.parametrize("kernels", ["torch", "cpp"])
def test_32_sequences_of_nine_adapters_and_the_base_equal_peft(world: World, kernels: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    if kernels == "cpp":
        needs_a_compiler()
    config = EngineConfig(
        model=world.base,
        kernels=kernels,
        device=device_of(kernels).type,
        kernel_cache=CACHE,
        kv_cache_mib=16,
        prefill_chunk_tokens=64,
        step_trace=trace,
        plan_ahead=PLAN_AHEAD,
    )
    served, engine = serve(world, config)
    expected = reference_logits(world, served)

    for one in served:
        assert len(one.tokens) == DECODED
        assert pages_for(len(one.prompt) + DECODED, PAGE_TOKENS) >= 3
    print(f"{world.family}: {assert_equal(served, expected)}")

    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    layers = engine.diagnostics.loaded.shape.layers
    assert all(line["calls"] == 1 and line["attention"] == layers and line["padding"] == 0 for line in lines)
    assert any(line["adapters"] >= 8 for line in lines)
    assert any(line["adapters"] >= 8 and line["prefill"] and line["decode"] for line in lines)
    assert engine.report().pages_free == engine.info.pages


def test_random_adapters_change_the_answers(world: World) -> None:
    """The comparison above would also hold for adapters of zeros."""
    from peft import PeftModel

    tokens = torch.arange(2, 40)[None]
    model = AutoModelForCausalLM.from_pretrained(world.base, dtype=torch.float32).eval()
    with torch.inference_mode():
        base = model(tokens).logits
    for folder in world.adapters.values():
        adapted = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(world.base, dtype=torch.float32), str(folder)
        )
        with torch.inference_mode():
            assert float((adapted.eval()(tokens).logits - base).abs().max()) > 0.01
