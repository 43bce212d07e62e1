"""The engines that pass the same tests: the real one with a tiny model, the fake one, and the one that drives vLLM,
with a function in vLLM's place."""

import time
from dataclasses import dataclass
from pathlib import Path

from motet.domain import PAGE_TOKENS
from motet_runner.engine import MIB, Engine
from motet_runner.external.vllm.driven import Driven
from motet_runner.external.vllm.engine import Engine as VllmEngine
from motet_runner.interface import EngineConfig
from motet_simulator.fake_engine import FakeEngine
from tests.runner.external.fake_driven import EOS, FakeDriven, facts
from tests.runner.judged_once import started

PAGE_BYTES = 2 * 3 * 2 * 16 * 4 * 16
"""The page size of the tiny model: keys and values of three layers with two heads, each 16 wide, float32, 16 tokens."""

ADAPTER_PAGES = 8
"""Of the tests' adapter in the tiny model."""


@dataclass(frozen=True, kw_only=True)
class Size:
    pages: int = 8
    host_pages: int = 0
    sequences: int = 8
    slots: int = 2
    length: int = 512
    page_tokens: int = PAGE_TOKENS
    """The real engine knows only this size."""
    patience: int = 0
    """How many iterations a sequence at the end of its promise waits for the supervisor's answer."""
    ahead: int = 0
    """How many iterations are planned and launched while an earlier one runs."""
    preset: str = "paged-chunk"


def fake(size: Size) -> FakeEngine:
    return FakeEngine(
        pages=size.pages,
        page_tokens=size.page_tokens,
        host_pages=size.host_pages,
        max_sequences=size.sequences,
        adapter_slots=size.slots,
        adapter_pages=ADAPTER_PAGES,
        max_model_length=size.length,
        protect_after_steps=size.patience,
        plan_ahead=size.ahead,
        preset=size.preset,
    )


def real(base: Path, size: Size) -> Engine:
    config = EngineConfig(
        model=base,
        kv_cache_mib=size.pages * PAGE_BYTES / MIB,
        host_kv_mib=size.host_pages * PAGE_BYTES / MIB,
        max_concurrent_sequences=size.sequences,
        max_resident_adapters=size.slots,
        max_model_length=size.length,
        protect_after_steps=size.patience,
        plan_ahead=size.ahead,
        preset=size.preset,
        prove_adapters=True,
    )
    return started(config)


def vllm(size: Size) -> VllmEngine:
    return on_vllm(
        FakeDriven(facts(blocks=size.pages, block_tokens=size.page_tokens, max_model_length=size.length)), size, EOS
    )


def on_vllm(driven: Driven, size: Size, eos: int) -> VllmEngine:
    """It has no host memory, and plans no iteration ahead."""
    config = EngineConfig(
        model=Path(),
        preset=size.preset,
        max_concurrent_sequences=size.sequences,
        max_resident_adapters=size.slots,
        protect_after_steps=size.patience,
        prove_adapters=True,
    )
    modules = {"model.layers.0.mlp.up_proj": (16, 32)}
    return VllmEngine(
        config,
        driven,
        target_modules=modules,
        eos_token_ids=(eos,),
        clock=time.perf_counter,
        adapter_pages=ADAPTER_PAGES,
    )
