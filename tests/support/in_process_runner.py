"""Real runner services in this process, with the fake engine behind them, on Unix sockets.

    async with in_process_runner(tmp_path, instance="r0", scheduler=address, engine=FakeEngine) as runner:
        ...  # runner.address; runner.service.accepted; await runner.restart(); runner.crash()

Keep `tmp_path` short: a Unix socket's path has at most 107 bytes. With `report_seconds=3` the runner reports late. With
`FakeEngine(decline_rate=0.3)` it declines at random.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from safetensors.numpy import save_file

from motet.health import Health
from motet.settings import Addresses, ProcessSettings
from motet_runner.engine_client import EngineClient
from motet_runner.interface import Engine
from motet_runner.service import RunnerService
from motet_runner.settings import Settings
from motet_simulator.fake_engine import FakeEngine
from tests.support.given_settings import given
from tests.support.surroundings import REAL
from tests.support.thread_engine import ThreadEngineClient

NOWHERE = "unix:/nonexistent/motet.sock"
SCALE = 0.05


@contextmanager
def short_folder() -> Iterator[Path]:
    """A temporary folder with a path short enough for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="mt", dir="/tmp") as folder:
        yield Path(folder)


def write_model(folder: Path) -> Path:
    """Write the files of a base model that a runner's service reads. The fake engine reads none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["FakeForCausalLM"], "hidden_size": 16}))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0}}}))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"w": np.zeros((2, 2), np.float32)}, folder / "model.safetensors")
    return folder


def write_adapter(folder: Path, *, seed: int = 0, rank: int = 4, **config: Any) -> Path:
    """Write a LoRA adapter that fits the fake engine's linears. Another seed gives another digest."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    random = np.random.default_rng(seed)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{module}.lora_A.weight": random.standard_normal((rank, 16), np.float32),
        f"{module}.lora_B.weight": random.standard_normal((16, rank), np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class InProcessRunner:
    def __init__(self, make: Callable[[], tuple[RunnerService, EngineClient]], address: str) -> None:
        self._make = make
        self._task: asyncio.Task[None] | None = None
        self.address = address
        self.service: RunnerService
        self.host: EngineClient

    async def start(self) -> None:
        self.service, self.host = self._make()
        self._task = asyncio.create_task(self.service.run(), name=f"runner {self.service.identity.instance}")
        ready = asyncio.create_task(self.service.ready.wait())
        await asyncio.wait({ready, self._task}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def ended(self) -> BaseException | None:
        """Wait until it ends by itself. Returns what it raised."""
        assert self._task is not None
        await asyncio.wait({self._task})
        return self._task.exception()

    @property
    def over(self) -> bool:
        return self._task is not None and self._task.done()

    def crash(self) -> None:
        """End the engine without any message. The service then ends by itself."""
        assert isinstance(self.host, ThreadEngineClient)
        self.host.crash()

    async def restart(self) -> None:
        """Start a new incarnation with the same name and address."""
        await self.stop()
        await self.start()


@asynccontextmanager
async def in_process_runner(
    folder: Path,
    *,
    instance: str = "r0",
    scheduler: str = NOWHERE,
    supervisor: str = NOWHERE,
    engine: Callable[[], Engine] = FakeEngine,
    command: Sequence[str] | None = None,
    time_scale: float = SCALE,
    health: Health | None = None,
    **settings: Any,
) -> AsyncIterator[InProcessRunner]:
    """A running service. All runners of one `folder` share its model and disk cache, as on one machine.

    The engine runs in a thread. With `command` it runs in the process that this command starts.
    """
    model = folder / "model"
    if not model.exists():
        write_model(model)
    listen = f"unix:{folder}/{instance}.sock"
    own = given(Settings)(model_uri=model.as_uri(), instance=instance, listen=listen, pool="default/demo", **settings)
    process = given(ProcessSettings)(data_dir=folder / "data", time_scale=time_scale)
    addresses = given(Addresses)(scheduler_address=scheduler, supervisor_address=supervisor)

    def make() -> tuple[RunnerService, EngineClient]:
        host: EngineClient
        host = (
            ThreadEngineClient(engine) if command is None else EngineClient(own.engine_config(model), process, command)
        )
        return RunnerService(own, process, addresses, host, CollectorRegistry(), surroundings=REAL, health=health), host

    runner = InProcessRunner(make, listen)
    await runner.start()
    try:
        yield runner
    finally:
        await runner.stop()
