"""Makes an environment that holds only what one extra of pyproject.toml installs. It consists of links, so it takes
seconds."""

import re
import sys
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from testbed.tree import ROOT


def install(extra: str, folder: Path) -> Path:
    """Install an extra. Returns the folder of its programs, `motet` among them. The product itself is this checkout."""
    venv.create(folder, symlinks=True, with_pip=False)
    programs = folder / "bin"
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for found in needed(project["project"], extra):
        _link(found, packages, _tops(found))
    ours = distribution(project["project"]["name"])
    _link(ours, packages, {top for top in _tops(ours) if top.endswith(".dist-info")})
    of_ours = [str(ROOT / name) for name in project["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    (packages / "motet.pth").write_text("\n".join([*of_ours, ""]))
    motet = programs / "motet"
    motet.write_text(f"#!{programs / 'python'}\nfrom motet_cli.main import main\n\nmain()\n")
    motet.chmod(0o755)
    return programs


def needed(project: dict[str, Any], extra: str) -> list[Distribution]:
    """The distributions that pip would install, with dependencies, without the product. All are installed here."""
    of_extras = project["optional-dependencies"]
    found: dict[tuple[str, str], Distribution] = {}

    def add(requirements: Iterable[str], of_extra: str = "") -> None:
        for one in map(Requirement, requirements):
            if one.marker is not None and not one.marker.evaluate({"extra": of_extra}):
                continue
            for more in ("", *one.extras):
                if one.name == project["name"]:
                    add(of_extras[more] if more else ())
                elif (_canonical(one.name), more) not in found:
                    found[_canonical(one.name), more] = distribution(one.name)
                    add(distribution(one.name).requires or (), more)

    add([*project["dependencies"], f"{project['name']}[{extra}]"])
    return list({name: one for (name, _), one in found.items()}.values())


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _tops(found: Distribution) -> set[str]:
    """The packages and modules of a distribution, and its metadata."""
    if found.files is None:
        raise PackageNotFoundError(f"{found.name} has no list of its files")
    return {file.parts[0] for file in found.files} - {"..", "__pycache__"}


def _link(found: Distribution, packages: Path, tops: Iterable[str]) -> None:
    """Distributions of one namespace, such as nvidia, share a folder, so it may exist already."""
    for top in tops:
        target = Path(str(found.locate_file(top)))
        if target.exists() and not (packages / top).is_symlink():
            (packages / top).symlink_to(target)
