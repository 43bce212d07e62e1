"""Tests find the Kubernetes tools, and their build is current. These tests need no cluster."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.machine import lacking
from testbed.tree import ROOT
from tools.kube import go_replaces
from tools.kube.binaries import KUBERNETES, MODULES, find

VARIABLES = ("KUBEBUILDER_ASSETS", "TEST_ASSET_ETCD", "USE_EXISTING_CLUSTER")

needs_go = pytest.mark.needs(lambda: shutil.which("go"), "Go")


@pytest.fixture(autouse=True)
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    forget_folders()
    yield
    forget_folders()  # otherwise later tests look for their tools in this folder


def forget_folders() -> None:
    for module in MODULES:
        vars(module).pop("built", None)


def tool(folder: Path, name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.touch(mode=0o755)
    return path


def build(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.kube.build", *arguments],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_tool_that_is_not_built_is_not_found() -> None:
    assert find("etcd") is None


def test_a_named_file_wins_over_a_folder_and_a_folder_over_our_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tool(KUBERNETES.built, "etcd")
    assert find("etcd") == built
    folder = tool(tmp_path / "assets", "etcd")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(folder.parent))
    assert find("etcd") == folder
    named = tool(tmp_path / "named", "my-etcd")
    monkeypatch.setenv("TEST_ASSET_ETCD", str(named))
    assert find("etcd") == named


def test_a_tool_missing_in_the_assets_folder_is_our_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = tool(KUBERNETES.built, "kube-controller-manager")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tool(tmp_path / "assets", "etcd").parent))
    assert find("kube-controller-manager") == built


def test_the_error_names_a_configured_file_that_is_missing() -> None:
    done = build(TEST_ASSET_ETCD="/nowhere/etcd")
    assert done.returncode == 1
    assert done.stderr == "TEST_ASSET_ETCD names /nowhere/etcd, which does not exist or is not executable.\n"


def test_with_all_tools_given_nothing_is_built(tmp_path: Path) -> None:
    for module in MODULES:
        for name, _ in module.packages:
            tool(tmp_path / "assets", name)
    done = build(KUBEBUILDER_ASSETS=str(tmp_path / "assets"), PATH="")
    assert (done.returncode, done.stderr) == (0, "Nothing to build: all tools exist.\n")


def test_beside_an_existing_cluster_only_clients_are_built(tmp_path: Path) -> None:
    for name in ("kubectl", "helm", "kwok", "versitygw", "registry", "oras"):
        tool(tmp_path / "assets", name)
    done = build(KUBEBUILDER_ASSETS=str(tmp_path / "assets"), USE_EXISTING_CLUSTER="true", PATH="")
    assert done.returncode == 0


def test_without_go_it_says_what_to_do() -> None:
    done = build(PATH="")
    assert done.returncode == 1
    assert "Install Go, or set KUBEBUILDER_ASSETS" in done.stderr


def test_an_unknown_tool_is_named_beside_the_known_ones() -> None:
    done = build("kubelet")
    assert done.returncode == 2
    assert "there is no tool kubelet; the tools are etcd, kube-apiserver" in done.stderr


def test_another_state_of_the_modules_is_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    before = KUBERNETES.built
    vars(KUBERNETES).pop("built")
    monkeypatch.setitem(vars(KUBERNETES), "flags", ("-race",))
    assert before != KUBERNETES.built
    vars(KUBERNETES).pop("built")


@needs_go
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_every_tool_is_a_tool_of_its_module(module) -> None:
    mod = go_replaces.parsed(module.folder / "go.mod")
    assert {line["Path"] for line in mod["Tool"]} == {package for _, package in module.packages}


@needs_go
def test_the_replace_lines_are_those_of_the_version_we_build() -> None:
    mod = go_replaces.parsed(go_replaces.MODULE / "go.mod")
    version = go_replaces.required(mod)[go_replaces.KUBERNETES]
    if not (published := go_replaces.published(version, offline=True)):
        lacking(f"the source of Kubernetes {version} (make kube)")
    assert go_replaces.present(mod) == go_replaces.wanted(go_replaces.parsed(published), version)


def test_only_published_staging_modules_are_replaced() -> None:
    theirs = {
        "Require": [
            {"Path": "k8s.io/api", "Version": "v0.0.0"},
            {"Path": "k8s.io/utils", "Version": "v0.0.0-20260210185600-b8788abfbbc2"},
            {"Path": "example.org/other", "Version": "v0.0.0"},
        ]
    }
    assert go_replaces.wanted(theirs, "v1.36.3") == {"k8s.io/api": "v0.36.3"}
