"""No buffer has torch's default type of numbers: transformers sets that for a moment, on whatever thread."""

import ast

import pytest

from testbed.tree import ROOT, tracked

FACTORIES = {"empty", "zeros", "ones", "full", "rand", "randn"}
FOLDERS = ("kernels/motet_kernels", "services/gpu-runner/motet_runner")


def untyped(source: str) -> list[int]:
    """The lines that make a tensor of the default type."""
    return [
        call.lineno
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in FACTORIES) == ("torch", True)
        and not any(keyword.arg == "dtype" for keyword in call.keywords)
    ]


def test_every_tensor_that_is_made_names_its_type() -> None:
    files = [path for path in tracked(*(ROOT / folder for folder in FOLDERS)) if path.suffix == ".py"]
    assert len(files) > 50
    found = {str(path.relative_to(ROOT)): untyped(path.read_text()) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(("source", "lines"), [("torch.empty(3)", [1]), ("\ntorch.zeros(2, dtype=t)", [])])
def test_the_search_finds_what_it_looks_for(source: str, lines: list[int]) -> None:
    assert untyped(source) == lines
