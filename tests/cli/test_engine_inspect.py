"""`motet engine inspect`: what it prints is what an engine does."""

import json
import shutil
from pathlib import Path

import pytest

from motet.domain import PAGE_TOKENS, Digest, pages_for
from motet.errors import SetupError
from motet_cli import engine_commands
from motet_runner.adapters.certification import certify
from motet_runner.engine import Engine
from motet_runner.inspection import AdapterCost, Inspection, Load, inspect
from motet_runner.interface import EngineConfig
from motet_runner.plan import PRESETS
from testbed.local_stack import BUNDLED
from tests.support.forked_motet import motet

MODEL, ADAPTERS = BUNDLED / "model", BUNDLED / "adapters"


@pytest.fixture(scope="module")
def found() -> Inspection:
    config = EngineConfig(model=MODEL, kv_cache_mib=16, dtype="float32")
    return inspect(config, load=Load(prompt=100, max_tokens=500, output=60), adapters=ADAPTERS)


def test_memory_and_adapters_take_what_an_engine_gives_them(found: Inspection) -> None:
    engine = Engine(
        EngineConfig(model=MODEL, kv_cache_mib=16, dtype="float32", kernels="torch", max_resident_adapters=5)
    )
    assert found.info.pages == engine.info.pages
    assert found.info.page_bytes * found.info.pages == 16 * 1024 * 1024
    for adapter in found.adapters:
        digest = Digest(adapter.name)
        engine.load_adapter(digest, certify(ADAPTERS / adapter.name, engine.info).layout)
        taken = engine.diagnostics.planner.adapters.pages_of(digest)
        assert adapter == AdapterCost(adapter.name, rank=adapter.rank, pages=taken, linears=28)
    assert {one.name for one in found.adapters} == {folder.name for folder in ADAPTERS.iterdir()}


def test_each_preset_admits_by_its_own_promise(found: Inspection) -> None:
    presets = {one.preset: one for one in found.presets}
    assert presets["ft-max"].promise == pages_for(found.info.max_model_length - 1, PAGE_TOKENS)
    assert presets["orca"].promise == pages_for(100 + 500 - 1, PAGE_TOKENS)
    assert presets["oracle"].promise == pages_for(100 + 60, PAGE_TOKENS)
    assert presets["punica"].promise == pages_for(100 + 16, PAGE_TOKENS)
    assert presets["punica"].requests == found.info.pages // pages_for(100 + 60 - 1, PAGE_TOKENS)
    for name, one in presets.items():
        assert name == "punica" or one.requests == found.info.pages // one.promise


def test_a_person_reads_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("structlog.configure", lambda **_: None)  # that of this process
    asked = {"kv_cache_mib": 16, "dtype": "float32", "prompt": 160, "output": 340, "max_tokens": 1024}
    assert engine_commands.inspect(MODEL, adapters=ADAPTERS / "pirate", as_json=False, **asked) == 0
    said = capsys.readouterr().out
    assert "LlamaForCausalLM: 4 layers" in said
    assert "paged-chunk" in said
    assert "pirate" in said


def test_an_adapter_that_would_be_refused_says_why_and_the_others_are_shown(tmp_path: Path) -> None:
    shutil.copytree(ADAPTERS / "pirate", tmp_path / "good")
    shutil.copytree(ADAPTERS / "pirate", tmp_path / "without-weights")
    (tmp_path / "without-weights" / "adapter_model.safetensors").unlink()
    done = motet("engine", "inspect", str(MODEL), "--json", "--kv-cache-mib", "16", "--adapters", str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["kv_bytes_per_token"] * found["kv_tokens"] == 16 * 1024 * 1024
    assert len(found["presets"]) == len(PRESETS)
    good, bad = found["adapters"]
    assert (good["refused"], good["rank"]) == ("", 8)
    assert "adapter_model.safetensors" in bad["refused"]


def test_what_cannot_be_inspected_is_named(tmp_path: Path) -> None:
    for config, says in (
        (EngineConfig(model=tmp_path), r"has no config\.json"),
        (EngineConfig(model=MODEL, dtype="int3"), r"engine\.dtype 'int3' is unknown"),
    ):
        with pytest.raises(SetupError, match=says):
            inspect(config, load=Load(prompt=1, max_tokens=1, output=1))
    done = motet("engine", "inspect", str(MODEL), "--adapters", str(tmp_path / "nowhere"))
    assert done.returncode in (1, 2)
    assert "is no folder" in done.stderr
    assert done.stdout == ""
