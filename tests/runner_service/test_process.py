"""The runner as a process with its engine in a spawned child, on a small random Llama."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from motet.errors import ModelFolderError
from motet.transport.over_grpc import is_healthy
from motet_runner.settings import Settings
from motet_runner.sources.base_model import model_folder
from tests.runner.random_models import RandomAdapter, save_adapter, save_base
from tests.runner_service.fake_peers import gateway_to, scheduler_at, until
from tests.support.in_process_runner import in_process_runner, write_model
from tests.support.lost_device import LOST, devices_can_be_lost, lose_the_device_of

PROMPT = tuple(range(10, 40))
START_SECONDS = 150
UNKNOWN = "sha256:" + "0" * 64


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    base = save_base("llama", folder / "base")
    for n in range(2):
        save_adapter(base, "llama", RandomAdapter(4 + 4 * n, 16), folder / f"a{n}", seed=n)
    return folder


@contextmanager
def process(folder: Path, model: str, scheduler: str = "unix:/nonexistent"):
    environment = os.environ | devices_can_be_lost(folder)
    environment |= {
        "MOTET_DATA_DIR": str(folder / "data"),
        "MOTET_METRICS_ADDRESS": f"unix:{folder}/m.sock",
        "MOTET_SCHEDULER_ADDRESS": scheduler,
        "MOTET_SUPERVISOR_ADDRESS": "unix:/nonexistent",
        "MOTET_STEP_TRACE": str(folder / "trace-{instance}.jsonl"),
        "MOTET_TIME_SCALE": "0.2",
        "MOTET_RUNNER_MODEL_URI": model,
        "MOTET_RUNNER_LISTEN": f"unix:{folder}/r.sock",
        "MOTET_RUNNER_INSTANCE": "r7",
        "MOTET_RUNNER_KV_CACHE_MIB": "8",
    }
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen([sys.executable, "-m", "motet_runner"], env=environment, stderr=log, stdout=log)
        try:
            yield running
        finally:
            if running.poll() is None:
                running.kill()
            running.wait()


@asynccontextmanager
async def loaded(folder: Path, models: Path, scheduler: str = "unix:/nonexistent"):
    """The process, its address, and how long this machine needs to start one: a busy machine needs longer."""
    address = f"unix:{folder}/r.sock"
    with process(folder, (models / "base").as_uri(), scheduler) as running:
        began = time.monotonic()
        while not await is_healthy(address):
            assert running.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < began + START_SECONDS
            await asyncio.sleep(0.05)
        yield running, address, time.monotonic() - began


def engine_of(running) -> psutil.Process:
    (engine,) = [
        child for child in psutil.Process(running.pid).children() if "motet_runner.engine_process" in child.cmdline()
    ]
    return engine


def is_loading(engine: psutil.Process) -> bool:
    return "libtorch" in Path(f"/proc/{engine.pid}/maps").read_text()


def logged(folder: Path) -> list[dict[str, Any]]:
    """No library writes between the lines, neither while a process works nor while it ends."""
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


async def gone(child: psutil.Process) -> None:
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


async def test_two_adapters_stream_and_a_device_that_fails_ends_the_runner(folder, models):
    scheduler_address = f"unix:{folder}/s.sock"
    async with (
        scheduler_at(scheduler_address) as scheduler,
        loaded(folder, models, scheduler_address) as (running, address, start_seconds),
    ):
        await until(lambda: scheduler.of("hello"))
        for name in ("a0", "a1"):
            scheduler.ensure(name, (models / name).as_uri())
        digests = {"base": ""} | {name: (await scheduler.adapter(name)).digest for name in ("a0", "a1")}
        async with gateway_to(address) as gateway:
            child = engine_of(running)
            child.suspend()  # no stream ends before all have begun
            for name, digest in digests.items():
                await gateway.submit(name, prompt=PROMPT, max_tokens=40, adapter=digest)
            child.resume()
            for name in digests:
                await gateway.finished(name)
            alone = {}
            for name, digest in digests.items():
                await gateway.submit(f"{name}-alone", prompt=PROMPT, max_tokens=40, adapter=digest)
                await gateway.finished(f"{name}-alone")
                alone[name] = gateway.tokens[f"{name}-alone", 1]
                assert gateway.tokens[name, 1] == alone[name]
                assert len(alone[name]) == 40
            assert len({tuple(tokens) for tokens in alone.values()}) == 3
            trace = [json.loads(line) for line in (folder / "trace-r7.jsonl").read_text().splitlines()]
            assert any(line["adapters"] >= 2 for line in trace)

            await gateway.submit("long", prompt=PROMPT, max_tokens=400)
            await until(lambda: gateway.tokens.get(("long", 1)))
            children = psutil.Process(running.pid).children()
            others = [one.pid for one in children if "motet_runner.adapters.check_process" not in one.cmdline()]
            assert others == [child.pid], "besides the engine, there are only those who check adapters"
            lose_the_device_of(child.pid, folder)
            began = time.monotonic()
            await until(lambda: running.poll() is not None)
            assert running.returncode == 1
            assert time.monotonic() - began < start_seconds, "it waited for something"
            await until(lambda: gateway.error)
            for one in children:
                await gone(one)
    (said,) = (line for line in logged(folder) if line["event"] == "device_failed")
    assert said["reason"] == LOST
    assert gateway.engine_died == "The engine has ended: exit status 1."
    assert not (folder / "r.sock").exists()


async def test_a_stopped_runner_leaves_nothing_behind(folder, models):
    async with loaded(folder, models) as (running, address, start_seconds), gateway_to(address) as gateway:
        await gateway.submit("long", prompt=PROMPT, max_tokens=400)
        await until(lambda: gateway.tokens.get(("long", 1)))
        child = engine_of(running)
        began = time.monotonic()
        running.send_signal(signal.SIGTERM)
        await until(lambda: running.poll() is not None)
        assert time.monotonic() - began < start_seconds, "it waited for something"
        assert running.returncode == 0
        assert not child.is_running()
    assert not any("exception" in line for line in logged(folder))
    assert not (folder / "r.sock").exists()
    assert not (folder / "m.sock").exists()


async def test_the_engine_dies_with_a_killed_runner(folder, models):
    """The kernel ends it: the engine is stopped and cannot end itself."""
    with process(folder, (models / "base").as_uri()) as running:
        engines = psutil.Process(running.pid).children
        await until(lambda: any(map(is_loading, engines())), seconds=START_SECONDS, every=0.05)
        child = engine_of(running)
        child.suspend()
        try:
            running.kill()
            await gone(child)
        finally:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def broken_json(folder):
    write_model(folder / "m")
    (folder / "m" / "config.json").write_text('{"architectures": ["NobodyKnowsThis"], "model_type": "unheard_of"}')
    return folder / "m"


def without(name):
    def make(folder):
        write_model(folder / "m")
        (folder / "m" / name).unlink()
        return folder / "m"

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "none", "There is no model folder"),
        (without("config.json"), "has no config.json"),
        (without("model.safetensors"), "has no *.safetensors"),
        (broken_json, ""),
    ],
)
def test_a_model_that_cannot_be_served_ends_the_runner_with_a_reason(folder, make, words):
    path = make(folder)
    with process(folder, path.as_uri()) as running:
        assert running.wait(START_SECONDS) == 2
    log = (folder / "log").read_text()
    assert str(path) in log
    assert words in log
    assert "Traceback" not in log.splitlines()[-1]


async def test_a_model_of_another_digest_ends_the_runner_before_there_is_an_engine(folder):
    never = ["sleep", "60"]
    with pytest.raises(ModelFolderError, match=f"asks for {UNKNOWN}"):
        async with in_process_runner(folder, command=never, model_digest=UNKNOWN):
            pass


async def test_a_model_that_is_never_served_is_refused_before_there_is_an_engine(folder):
    config = write_model(folder / "m") / "config.json"
    config.write_text('{"architectures": ["BartModel"], "is_encoder_decoder": true}')
    with pytest.raises(ModelFolderError, match="BartModel is an encoder-decoder"):
        await model_folder(Settings(model_uri=(folder / "m").as_uri()), None, folder)


def test_the_service_imports_without_torch():
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
import motet_runner.service, motet_runner.__main__
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
