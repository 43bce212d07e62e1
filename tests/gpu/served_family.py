"""A tiny model of a family, served by an engine on the GPU's kernels: prompts in chunks, prefixes that are shared, the
base and adapters of mixed ranks side by side."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from motet.domain import BASE, PAGE_TOKENS, Digest, RequestId, pages_for
from motet.prefix_hints import prefix_salt
from motet_kernels.gpu.launches import traced_launches
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, NewSequence, Sampling
from tests.gpu.devices import DEVICE
from tests.runner.engines import BASE_DIGEST, load
from tests.runner.families import BY_NAME, save_adapters, save_model
from tests.runner.peft_reference import Served, World, assert_equal, reference_logits
from tests.runner.random_models import VOCABULARY, RandomAdapter

DECODED = 4
CHUNK = 24
SHARED = 20
"""Tokens with which two prompts of a tenant begin: more than a page"""
PROMPTS = (37, 5, SHARED + 9, 12, SHARED + 1)
VOICES = (0, None, 1, 0, 1)
"""The adapter of each; None: the base"""
ADAPTERS = (RandomAdapter(4, 8), RandomAdapter(24, 24, rslora=True))


@dataclass
class Run:
    engine: Engine
    world: World
    served: list[Served]
    launches: list[list[str]]
    """Of each iteration"""


def serve_as_peft(family: str, folder: Path, adapter_dtype: str = "auto") -> Run:
    """Serve it, and compare with transformers and PEFT. Of int8, PEFT gets the adapters that the integers stand for."""
    run = _serve(family, folder, adapter_dtype)
    assert run.engine.info.kernels.serving == "triton"
    assert all(len(one.tokens) == DECODED for one in run.served)
    if run.engine.diagnostics.loaded.window is None:  # pages that a window may leave are not shared
        assert run.engine.report().prefix_hit_tokens > 0
    print(assert_equal(run.served, reference_logits(run.world, run.served)))
    return run


def _serve(family: str, folder: Path, adapter_dtype: str) -> Run:
    of_family = BY_NAME[family]
    base = save_model(of_family.config, folder / "base")
    folders = save_adapters(base, of_family, folder, ADAPTERS)
    to_load = {Digest(f"sha256:{number}"): one for number, one in enumerate(folders)}
    meant = to_load if adapter_dtype == "auto" else {name: _of_integers(one) for name, one in to_load.items()}
    world = World(family, base, meant)
    digests = list(world.adapters)
    served = [
        Served(RequestId(f"r{number}"), BASE if voice is None else digests[voice], prompt)
        for number, (voice, prompt) in enumerate(zip(VOICES, _prompts(), strict=True))
    ]
    by_request = {one.request: one for one in served}

    def keep(requests: list[RequestId], logits: torch.Tensor) -> None:
        for request, row in zip(requests, logits, strict=True):
            by_request[request].logits.append(row.clone())

    config = EngineConfig(
        model=base,
        kernels="triton",
        device=DEVICE.type,
        dtype="float32",
        adapter_dtype=adapter_dtype,
        kv_cache_mib=2,
        max_model_length=48,
        prefill_chunk_tokens=CHUNK,
        decode_slowdown=1e9,
        threads=1,
    )
    engine = Engine(config, on_logits=keep)
    for digest, one in to_load.items():
        load(engine, digest, one)
    launches: list[list[str]] = []
    waiting = list(served)
    while waiting or engine.has_work():
        for one in waiting[:2]:
            if one is not served[-1] or served[2].tokens:  # the last one finds the prefix computed
                engine.add(_asked(one))
                waiting.remove(one)
        with traced_launches() as trace:
            output = engine.step()
        launches.append(trace)
        for one in output.sequences:
            assert one.error is None
            by_request[one.request].tokens += one.tokens
        engine.check()
    return Run(engine, world, served, launches)


def _of_integers(adapter: Path) -> Path:
    """The same adapter in a folder beside it, with each row of A and each column of B as 8-bit integers say it"""
    rounded = shutil.copytree(adapter, adapter.with_name(f"{adapter.name} of integers"))
    file = rounded / "adapter_model.safetensors"
    matrices = load_file(file)
    for name, matrix in matrices.items():
        step = matrix.abs().amax(dim=1 if "lora_A" in name else 0, keepdim=True) / 127
        matrices[name] = (matrix / step).round() * step
    save_file(matrices, file, metadata={"format": "pt"})
    return rounded


def _prompts() -> Iterator[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    begin = torch.randint(2, VOCABULARY, (SHARED,), generator=generator).tolist()
    for length in PROMPTS:
        prompt = torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()
        yield tuple([*begin, *prompt[SHARED:]] if length > SHARED else prompt)


def _asked(one: Served) -> NewSequence:
    return NewSequence(
        request=one.request,
        epoch=1,
        prompt=one.prompt,
        adapter=one.adapter,
        promise=pages_for(len(one.prompt) + DECODED, PAGE_TOKENS),
        sampling=Sampling(max_tokens=DECODED, ignore_eos=True),
        tenant="somebody",
        prefix_salt=prefix_salt(BASE_DIGEST, one.adapter, "somebody"),
    )
