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

blocked = set(sys.argv[2].split(","))

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked in this test")

sys.meta_path.insert(0, Blocked())
root = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(getattr(root, "__path__", []), root.__name__ + "."):
    if ".migrations" not in module.name:  # alembic runs these itself
        importlib.import_module(module.name)
assert not blocked & sys.modules.keys()
"""


TORCH = ("torch", "transformers", "peft")
ELSEWHERE = {
    "motet_scheduler": ("kopf", "watchfiles", "sqlalchemy", "fastapi", "typer"),
    "motet_operator.cluster": ("watchfiles", "fastapi", "typer"),
    "motet_operator.local": ("kopf", "kubernetes", "aiohttp", "fastapi"),
}
"""What is not installed where this runs: in its image, or with `make up`."""


def imports_without(package: str, blocked: tuple[str, ...]) -> str:
    """What it complains of."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, package, ",".join(blocked)],
        capture_output=True,
        text=True,
        check=False,
    ).stderr


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_every_module_imports_with_torch_blocked(package: str) -> None:
    assert not imports_without(package, TORCH)


@pytest.mark.parametrize(("package", "blocked"), ELSEWHERE.items())
def test_every_module_imports_without_what_others_need(package: str, blocked: tuple[str, ...]) -> None:
    assert not imports_without(package, blocked)
