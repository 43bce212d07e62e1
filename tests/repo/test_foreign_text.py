"""Text from elsewhere is never taken for markup: one module prints with rich, and it switches markup off."""

import ast

from testbed.tree import ROOT

PRINTER = ROOT / "cli/motet_cli/printer.py"
PACKAGES = ("cli", "operator", "services", "simulator", "kernels")


def imported(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_only_the_printer_uses_rich() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert [file for file in files if "rich" in imported(file.read_text())] == [PRINTER]


def test_the_printer_never_reads_markup() -> None:
    source = PRINTER.read_text()
    assert "rich.markup" not in source
    assert "from_markup" not in source
    consoles = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console"
    ]
    assert consoles
    for console in consoles:
        options = {one.arg: one.value for one in console.keywords}
        for switch in ("markup", "emoji", "highlight"):
            assert isinstance(options[switch], ast.Constant)
            assert options[switch].value is False
