"""What an engine's process imports: no compiler, and nothing for training."""

import importlib
import json
import subprocess
import sys
import threading
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest
import transformers

from motet_runner.engine_imports import _Postponed
from tests.runner.families import FAMILIES, save_model

UNUSED = {
    "torch._dynamo.convert_frame",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "accelerate",
    "pandas",
    "peft",
    "scipy",
    "sklearn",
    "torchvision",
}
"""transformers and torch import these by themselves, or once did, where they are installed."""
SERVED = ("Llama", "Mixtral, a mixture of experts", "GPT-2")


def said(script: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-P", "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_an_engine_loads_models_of_all_families_without_what_only_training_needs(tmp_path: Path) -> None:
    served = [save_model(one.config, tmp_path / str(n)) for n, one in enumerate(FAMILIES) if one.name in SERVED]
    assert len(served) == len(SERVED)
    script = """
import importlib, json, pathlib, sys
from motet_runner.engine_process import load_engine
from motet_runner.interface import EngineConfig

architectures = []
for folder in sys.argv[1].split():
    model = pathlib.Path(folder)
    config = EngineConfig(model=model, device="cpu", kernels="torch", kv_cache_mib=2, max_model_length=64)
    architectures.append(load_engine(config, lambda *_: None).info.architecture)
for module in sys.argv[2].split():
    importlib.import_module(module)
print(json.dumps([architectures, sorted(sys.modules)]))
"""
    modelling = {type(one.config).__module__.replace("configuration_", "modeling_") for one in FAMILIES}
    *_, last = said(script, " ".join(map(str, served)), " ".join(sorted(modelling)))
    architectures, imported = json.loads(last)
    assert architectures == ["LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"]
    assert modelling <= set(imported)
    assert UNUSED & set(imported) == set()


def test_peft_finds_all_that_it_asks_transformers_and_torch_for() -> None:
    script = """
from motet_runner.engine_imports import for_an_engine
with for_an_engine(None, beside_peft=True):
    import motet_runner.engine
import json, sys, torch
imported = sorted(sys.modules)
import peft, transformers
from transformers.utils import import_utils
print(json.dumps([imported, [getattr(import_utils, name)() for name in sys.argv[1:]]]))
"""
    (last,) = said(script, "is_accelerate_available", "is_torch_distributed_available")
    imported, available = json.loads(last)
    assert "torch._dynamo.convert_frame" not in imported
    assert available == [True, True]


@pytest.mark.parametrize(
    "needs_it",
    [
        pytest.param("import torch._dynamo.config", marks=pytest.mark.soak),
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)) == 2",
    ],
)
def test_transformers_has_all_its_names_and_the_compiler_is_whole_once_something_needs_it(needs_it: str) -> None:
    script = f"""
import json, sys
from motet_runner.engine_imports import for_an_engine
with for_an_engine(None):
    import transformers.masking_utils
import torch
print(json.dumps([sorted(transformers.__all__), sorted(transformers.models.__all__)]))
known = torch._dynamo
print("torch._dynamo.convert_frame" in sys.modules, known.disable(abs) is abs, known.disable()(abs) is abs)
{needs_it}
print("torch._dynamo.convert_frame" in sys.modules, torch._dynamo is known, known.disable.__module__)
"""
    names, before, after = said(script)
    assert json.loads(names) == [sorted(transformers.__all__), sorted(transformers.models.__all__)]
    assert before == "False True True"
    assert after == "True True torch._dynamo.decorators"


def test_threads_that_ask_for_the_compiler_at_once_get_all_of_it() -> None:
    script = """
import threading, time
from motet_runner.engine_imports import for_an_engine
with for_an_engine(None):
    import transformers.masking_utils
import torch
found = []

def ask(name, later):
    time.sleep(later)
    try:
        found.append(getattr(torch._dynamo, name) is not None)
    except AttributeError as error:
        found.append(str(error))

names = ("config", "optimize", "explain", "reset", "run")
threads = [threading.Thread(target=ask, args=(name, number / 50)) for number, name in enumerate(names)]
[one.start() for one in threads]
[one.join() for one in threads]
print(found)
"""
    (last,) = said(script)
    assert last == str([True] * 5)


def test_a_thread_that_imports_a_part_does_not_wait_for_the_one_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python locks the part before it asks the package where it is. Mutation: the package waits for who runs it."""
    (folder := tmp_path / "postponed").mkdir()
    (folder / "__init__.py").write_text(
        "import threading\nruns, looks = threading.Event(), threading.Event()\n"
        "runs.set()\nlooks.wait(60)\nfrom . import part\nwhole = True\n"
    )
    (folder / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    spec = find_spec("postponed")
    assert spec is not None
    package = module_from_spec(spec)
    del package.__path__
    looked = threading.Event()

    class Watched(_Postponed):
        @property
        def __path__(self) -> object:  # type: ignore[override]
            if threading.current_thread() is importing:
                looked.set()
            return super().__path__

    package.__class__ = Watched
    monkeypatch.setitem(sys.modules, "postponed", package)
    importing = threading.Thread(target=importlib.import_module, args=("postponed.part",), daemon=True)
    running = threading.Thread(target=lambda: package.whole, daemon=True)
    running.start()
    while not (runs := vars(package).get("runs")):
        running.join(0.01)
    assert runs.wait(60)
    importing.start()
    assert looked.wait(60)
    package.looks.set()
    for thread in (importing, running):
        thread.join(20)
        assert not thread.is_alive()
    assert package.whole
    assert sys.modules.pop("postponed.part") is package.part
