"""What the Dockerfiles do, without Docker; see installation."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from testbed.ports import free_port
from testbed.tree import ROOT
from tests.images.installation import USER, Installed, build_wheel, installation, user_of, volume

BUNDLED_MODEL = ROOT / "cli" / "motet_cli" / "bundled" / "model"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest, wheel: Path) -> Iterator[Installed]:
    with installation(request.param, wheel) as made:
        yield made


def image(name: str) -> "pytest.MarkDecorator":
    return pytest.mark.parametrize("installed", [name], indirect=True)


def serves(installed: Installed, env: Mapping[str, str], *, within_s: float = 60) -> None:
    metrics = free_port()
    env = {"MOTET_METRICS_ADDRESS": f"127.0.0.1:{metrics}", **env}
    with installed.serving(metrics, "/livez", "/readyz", env=env, within_s=within_s) as process:
        assert user_of(process) == USER
        process.terminate()
        assert process.wait(30) == 0


@image("scheduler")
def test_the_scheduler_runs_on_what_its_image_holds(installed: Installed) -> None:
    serves(installed, {"MOTET_SCHEDULER_ADDRESS": f"127.0.0.1:{free_port()}"})


@image("scheduler")
def test_an_image_holds_no_more_than_it_needs(installed: Installed) -> None:
    output = subprocess.run(
        [
            *(sys.executable, "-m", "pip", f"--python={installed.folder / 'bin' / 'python'}", "list"),
            *("--format=json", "--disable-pip-version-check"),
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    held = {one["name"] for one in json.loads(output)}
    assert {"motet", "grpcio", "kubernetes"} <= held
    assert not held & {"torch", "transformers", "fastapi", "SQLAlchemy", "typer", "pytest", "ruff", "kopf"}


@pytest.mark.soak
@image("operator")
def test_the_operators_image_migrates_a_database(installed: Installed) -> None:
    code, output = installed.run("python", "-P", "-m", "motet.store")
    assert code == 0, output


@pytest.mark.soak
@image("operator")
def test_the_operator_says_what_it_lacks_outside_a_cluster(installed: Installed) -> None:
    code, output = installed.run(env={"MOTET_CLUSTER_RUNNER_TEMPLATE": "/etc/motet/runner/template.yaml"})
    assert code == 2, output
    assert "MOTET_CLUSTER_RUNNER_TEMPLATE: /etc/motet/runner/template.yaml is not a template for runner pods" in output


@pytest.mark.soak
@image("supervisor")
def test_the_supervisor_runs_on_what_its_image_holds(installed: Installed) -> None:
    serves(installed, {"MOTET_SUPERVISOR_ADDRESS": f"127.0.0.1:{free_port()}"})


@pytest.mark.soak
@image("predictor")
def test_the_predictor_runs_on_what_its_image_holds(installed: Installed) -> None:
    serves(installed, {"MOTET_PREDICTOR_ADDRESS": f"127.0.0.1:{free_port()}"})


@pytest.mark.soak
@image("predictor")
def test_the_predictors_image_makes_api_keys(installed: Installed) -> None:
    makes_api_keys(installed)


@pytest.mark.soak
@image("gateway")
def test_the_gateway_runs_on_what_its_image_holds(installed: Installed) -> None:
    port = free_port()
    with installed.serving(port, "/version", env={"MOTET_GATEWAY_PORT": str(port)}) as process:
        assert user_of(process) == USER


@pytest.mark.soak
@image("gateway")
def test_the_gateways_image_makes_api_keys(installed: Installed) -> None:
    makes_api_keys(installed)


def makes_api_keys(installed: Installed) -> None:
    code, output = installed.run("motet", "key", "create", "--tenant=acme")
    assert code == 0, output
    assert "tenant acme, scope user, does not expire" in output


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[str]:
    """One that welcomes runners, from this checkout; where it listens."""
    address = f"127.0.0.1:{free_port()}"
    env = {"MOTET_SCHEDULER_ADDRESS": address, "MOTET_METRICS_ADDRESS": f"127.0.0.1:{free_port()}"}
    env["MOTET_DATA_DIR"] = str(tmp_path)
    process = subprocess.Popen([sys.executable, "-P", "-m", "motet_scheduler"], env={**os.environ, **env})
    try:
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.mark.soak
@image("runner")
def test_the_runner_serves_a_model_on_what_its_image_holds(installed: Installed, scheduler: str) -> None:
    with volume(BUNDLED_MODEL) as model:
        env = {
            "MOTET_RUNNER_MODEL_URI": f"file://{model / BUNDLED_MODEL.name}",
            "MOTET_RUNNER_LISTEN": f"127.0.0.1:{free_port()}",
            "MOTET_SCHEDULER_ADDRESS": scheduler,
        }
        serves(installed, env, within_s=180)


@pytest.mark.soak
@image("runner")
def test_the_runners_image_has_compiled_kernels(installed: Installed, scheduler: str) -> None:
    """With a root that cannot be written, as a user that is not root, and without a compiler."""
    names = {path.name.rpartition("-")[0] for path in (installed.folder / "motet-kernels").iterdir()}
    of_x86 = {"amx-bf16", "avx512-bf16", "avx512", "avx2"} if platform.machine() == "x86_64" else set()
    assert names == {"basic", *of_x86}
    with volume(BUNDLED_MODEL) as model:
        env = {
            "MOTET_RUNNER_MODEL_URI": f"file://{model / BUNDLED_MODEL.name}",
            "MOTET_RUNNER_LISTEN": f"127.0.0.1:{free_port()}",
            "MOTET_RUNNER_KERNELS": "cpp",
            "MOTET_RUNNER_COMPILER": "no-such-compiler",
            "MOTET_SCHEDULER_ADDRESS": scheduler,
        }
        serves(installed, env, within_s=180)


@pytest.mark.soak
@image("runner")
def test_the_runners_image_reads_a_model(installed: Installed) -> None:
    code, output = installed.run(env={"MOTET_RUNNER_MODEL_URI": "file:///nowhere"})
    assert code == 2, output
    assert "There is no model folder /nowhere" in output
