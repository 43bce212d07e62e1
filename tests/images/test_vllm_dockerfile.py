"""The image of a runner with vLLM: vLLM's own, with Motet beside it."""

import re
import subprocess
import sys

from motet_runner.external.vllm.versions import SETTING, TESTED
from testbed.tree import ROOT, pyproject
from tests.images.dockerfile import FOLDERS, read
from tests.repo.test_dependencies import needed

FILE = read(FOLDERS["runner"], "Dockerfile.vllm")
OURS = read(FOLDERS["runner"])


def variables() -> dict[str, str]:
    said = " ".join(FILE.final.all("ENV"))
    return dict(re.findall(r"(\w+)=(\S+)", said))


def test_it_is_vllms_image_of_a_tested_version() -> None:
    image = FILE.arguments["VLLM"]
    assert re.fullmatch(rf"vllm/vllm-openai:v({'|'.join(map(re.escape, TESTED))})\.\d+(@sha256:[0-9a-f]{{64}})?", image)
    assert [stage.base for stage in FILE.stages] == ["${PYTHON}", "${VLLM}", "${VLLM}"]
    assert FILE.arguments["PYTHON"] == OURS.arguments["PYTHON"]


def test_it_runs_as_the_other_images_do() -> None:
    assert FILE.entrypoint == OURS.entrypoint
    for instruction in ("USER", "EXPOSE", "WORKDIR"):
        assert FILE.final.last(instruction) == OURS.final.last(instruction)
    (user,) = [run for run in FILE.final.all("RUN") if "useradd" in run]
    assert user in OURS.final.all("RUN")
    assert FILE.final.instructions[-1][0] == "ENTRYPOINT"
    labels = FILE.final.labels
    assert labels["org.opencontainers.image.title"] == "motet-runner-vllm"
    assert labels["org.opencontainers.image.version"] == pyproject()["project"]["version"]


def test_the_last_stage_installs_nothing() -> None:
    assert FILE.final.all("COPY") == [
        f"--from=environment {folder} {folder}" for folder in ("/opt/motet", "/opt/engine")
    ]
    assert not [run for run in FILE.final.all("RUN") if re.search("pip|apt", run)]


def test_the_service_has_no_torch_and_needs_none() -> None:
    (service,) = [run for run in FILE.stages[1].all("RUN") if "venv /opt/motet" in run]
    assert "[runner-service,grammars]" in service
    assert "--system-site-packages" not in service
    extras = pyproject()["project"]["optional-dependencies"]
    without = set(needed(extras["runner"])) - set(needed(extras["runner-service"]))
    assert without >= {"torch", "transformers", "safetensors"}
    code = (
        "import sys\n"
        "from importlib.metadata import packages_distributions\n"
        f"without = {without | {'motet-kernels'}}\n"
        "lacking = {name for name, by in packages_distributions().items() if {one.lower() for one in by} <= without}\n"
        "sys.modules |= dict.fromkeys(lacking)\n"
        "import motet_runner.__main__, motet_runner.adapters.check_process, motet_runner.sources.hub_repository\n"
        "import motet_runner.sources.web_folder"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_vllms_environment_is_added_to_and_not_changed() -> None:
    (engine,) = [run for run in FILE.stages[1].all("RUN") if "/opt/engine" in run]
    assert "venv --system-site-packages /opt/engine" in engine
    assert "pip list --format=freeze >/there.txt" in engine
    assert "--constraint /there.txt" in engine
    assert variables()[SETTING] == "/opt/engine/bin/python"


def test_what_is_compiled_lies_on_the_data_volume() -> None:
    caches = {name: value for name, value in variables().items() if re.search("CACHE|CONFIG_ROOT|WORKSPACE", name)}
    assert len(caches) == 6
    chart = (ROOT / "charts/motet/templates/runner.yaml").read_text()
    assert "{name: data, mountPath: /var/lib/motet}" in chart
    assert all(value.startswith("/var/lib/motet/vllm") for value in caches.values())
