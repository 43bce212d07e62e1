"""Real engines in processes of their own, of which a test can say that the device is lost: the next forward pass raises
the driver's error.

    env = os.environ | devices_can_be_lost(folder)  # of the engine, or of a process that starts it
    lose_the_device_of(engine_pid, folder)
"""

import os
from pathlib import Path

LOST = "CUDA error: the device is lost"

_SITECUSTOMIZE = """
import importlib.abc, os, pathlib, sys

class Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self.create_module, self.exec_first = loader.create_module, loader.exec_module

    def exec_module(self, module):
        self.exec_first(module)
        import torch
        forward = module.LoadedModel.forward
        lost = pathlib.Path(os.environ["DEVICES_ARE_LOST_IN"]) / str(os.getpid())

        def forward_until_lost(self, batch):
            if lost.exists():
                raise torch.AcceleratorError(os.environ["DEVICES_ARE_LOST_WITH"])
            return forward(self, batch)

        module.LoadedModel.forward = forward_until_lost

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "motet_runner.execute.forward.modules":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        spec.loader = Loader(spec.loader)
        return spec

import importlib.util
sys.meta_path.insert(0, Finder())
"""


def devices_can_be_lost(folder: Path) -> dict[str, str]:
    """The environment."""
    faults = _faults(folder)
    faults.mkdir(exist_ok=True)
    (faults / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    on_path = os.pathsep.join(filter(None, [str(faults), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": on_path, "DEVICES_ARE_LOST_IN": str(faults), "DEVICES_ARE_LOST_WITH": LOST}


def lose_the_device_of(engine: int, folder: Path) -> None:
    (_faults(folder) / str(engine)).touch()


def _faults(folder: Path) -> Path:
    return folder / "faults"
