"""The control plane runs where torch is not installed."""

import subprocess
import sys

import pytest

WITHOUT_TORCH = [
    "motet",
    "motet_gateway",
    "motet_scheduler",
    "motet_supervisor",
    "motet_predictor",
    "motet_operator",
    "motet_cli",
    "motet_runner.plan",
    "motet_runner.service",
]

SCRIPT = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "peft"):
            raise ModuleNotFoundError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Blocked())
root = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(root, "__path__", []), root.__name__ + "."):
    if ".migrations" not in module.name:  # alembic runs these itself
        importlib.import_module(module.name)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_every_module_imports_with_torch_blocked(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, package], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
