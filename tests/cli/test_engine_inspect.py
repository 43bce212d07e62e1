"""`motet engine inspect`, the real command: what it prints is what an engine does."""

import json
import shutil
from pathlib import Path
from typing import Any

from motet.domain import Digest, pages_for
from motet_runner.adapters.certification import certify
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig
from tests.cli.test_commands import motet
from tests.stack.harness import BUNDLED

MODEL, ADAPTERS = BUNDLED / "model", BUNDLED / "adapters"


def inspected(*arguments: str, status: int = 0) -> dict[str, Any]:
    done = motet("engine", "inspect", str(MODEL), "--json", *arguments)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_memory_and_adapters_take_what_an_engine_gives_them() -> None:
    found = inspected("--kv-cache-mib", "16", "--dtype", "float32", "--adapters", str(ADAPTERS))
    engine = Engine(
        EngineConfig(model=MODEL, kv_cache_mib=16, dtype="float32", kernels="torch", max_resident_adapters=5)
    )
    assert found["pages"] == engine.info.pages
    assert found["kv_bytes_per_token"] * found["kv_tokens"] == 16 * 1024 * 1024
    for adapter in found["adapters"]:
        digest = Digest(adapter["name"])
        engine.load_adapter(digest, certify(ADAPTERS / adapter["name"], engine.info).layout)
        taken = engine._planner.adapters.pages_of(digest)
        assert adapter == {
            "name": adapter["name"], "rank": adapter["rank"], "pages": taken, "linears": 28, "refused": "",
        }  # fmt: skip
    assert {one["name"] for one in found["adapters"]} == {folder.name for folder in ADAPTERS.iterdir()}


def test_each_preset_admits_by_its_own_promise() -> None:
    found = inspected("--kv-cache-mib", "16", "--prompt", "100", "--output", "60", "--max-tokens", "500")
    presets = {one["preset"]: one for one in found["presets"]}
    assert presets["ft-max"]["promise"] == pages_for(found["context"] - 1)
    assert presets["orca"]["promise"] == pages_for(100 + 500 - 1)
    assert presets["oracle"]["promise"] == pages_for(100 + 60)
    assert presets["punica"]["promise"] == pages_for(100 + 16)
    assert presets["punica"]["requests"] == found["pages"] // pages_for(100 + 60 - 1)
    for name, one in presets.items():
        assert name == "punica" or one["requests"] == found["pages"] // one["promise"]


def test_a_person_reads_a_table() -> None:
    done = motet("engine", "inspect", str(MODEL), "--adapters", str(ADAPTERS / "pirate"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("LlamaForCausalLM: 4 layers")
    assert "paged-chunk" in done.stdout
    assert "pirate" in done.stdout
    assert done.stderr == ""


def test_an_adapter_that_would_be_refused_says_why_and_the_others_are_shown(tmp_path: Path) -> None:
    shutil.copytree(ADAPTERS / "pirate", tmp_path / "good")
    shutil.copytree(ADAPTERS / "pirate", tmp_path / "without-weights")
    (tmp_path / "without-weights" / "adapter_model.safetensors").unlink()
    found = inspected("--adapters", str(tmp_path), status=1)
    good, bad = found["adapters"]
    assert (good["refused"], good["rank"]) == ("", 8)
    assert "adapter_model.safetensors" in bad["refused"]


def test_what_cannot_be_inspected_is_named(tmp_path: Path) -> None:
    for arguments, says in (
        ((str(tmp_path),), "has no config.json"),
        ((str(MODEL), "--dtype", "int3"), "engine.dtype 'int3' is unknown"),
        ((str(MODEL), "--adapters", str(tmp_path / "nowhere")), "is no folder"),
    ):
        done = motet("engine", "inspect", *arguments)
        assert done.returncode in (1, 2)
        assert says in done.stderr
        assert done.stdout == ""
