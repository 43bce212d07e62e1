"""The engine's process until it has an engine."""

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry

from motet.health import Health
from motet.settings import Addresses, ProcessSettings
from motet_runner.engine_client import EngineClient
from motet_runner.interface import EngineConfig
from motet_runner.service import RunnerService
from motet_runner.settings import Settings
from motet_simulator.fake_engine import FakeEngine
from tests.runner.random_models import save_base
from tests.support.surroundings import REAL
from tests.support.thread_engine import ThreadEngineClient


async def test_the_process_says_how_much_of_the_weights_it_has_read(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    engine = EngineClient(EngineConfig(model=base, kv_cache_mib=4), ProcessSettings(data_dir=tmp_path))
    said = []
    await engine.start()
    try:
        async with asyncio.timeout(120):
            info = await engine.loaded(lambda *progress: said.append(progress))
    finally:
        await engine.stop()
    assert info.architecture == "LlamaForCausalLM"
    size = (base / "model.safetensors").stat().st_size
    read, total = said[-1]
    assert size * 0.9 < read == total < size


def test_a_runner_that_is_not_ready_says_how_much_of_the_model_is_loaded(tmp_path: Path) -> None:
    save_base("llama", tmp_path / "base")
    settings = Settings(model_uri=(tmp_path / "base").as_uri(), pool="default/demo")
    health = Health()
    process = ProcessSettings(data_dir=tmp_path)
    service = RunnerService(
        settings,
        process,
        Addresses(),
        ThreadEngineClient(FakeEngine),
        CollectorRegistry(),
        surroundings=REAL,
        health=health,
    )
    assert health.unready_reason() == "the runner is loading the model"
    service.on_load_progress(3 << 29, 6 << 30)
    assert health.unready_reason() == "the runner is loading the model (25% of 6.0 GiB)"
