"""One image for each deployable: what it starts, as whom, and with what inside."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from motet_kernels.cpp import builder
from testbed.tree import ROOT, package_folders, pyproject
from tests.images.dockerfile import FOLDERS, read

MODULES = {
    "gateway": "motet_gateway",
    "scheduler": "motet_scheduler",
    "predictor": "motet_predictor",
    "supervisor": "motet_supervisor",
    "runner": "motet_runner",
    "operator": "motet_operator.cluster",
}
PORTS = {"gateway": "8000", "scheduler": "7101", "predictor": "7102", "supervisor": "7103", "runner": "7110"}
OF_A_CLUSTER = {"kubernetes", "cluster", "postgres", "cli"}
"""Extras for what a deployable meets in a cluster and not on a laptop. There, `motet key` is run in a gateway's pod."""

every_deployable = pytest.mark.parametrize("name", FOLDERS)


def test_each_deployable_has_a_dockerfile_and_nothing_else_has() -> None:
    found = {path.parent for path in ROOT.glob("*/Dockerfile")} | {path.parent for path in ROOT.glob("*/*/Dockerfile")}
    assert found == set(FOLDERS.values())


@every_deployable
def test_an_image_starts_its_module_directly_so_that_signals_arrive(name: str) -> None:
    assert read(FOLDERS[name]).entrypoint == ["python", "-P", "-m", MODULES[name]]
    assert importlib.util.find_spec(f"{MODULES[name]}.__main__") is not None


@every_deployable
def test_an_image_runs_as_a_numeric_user(name: str) -> None:
    final = read(FOLDERS[name]).final
    assert final.last("USER") == "65532:65532"
    after = [what for what, _ in final.instructions][[what for what, _ in final.instructions].index("USER") :]
    assert set(after) <= {"USER", "EXPOSE", "ENTRYPOINT"}, "what comes later would not be root's"


@every_deployable
def test_an_image_is_built_in_stages_and_the_last_installs_nothing_but_the_runners_c_compiler(name: str) -> None:
    file = read(FOLDERS[name])
    assert [stage.base for stage in file.stages] == ["${PYTHON}"] * 3
    assert [stage.name for stage in file.stages] == ["wheel", "environment", ""]
    assert file.final.all("COPY") == ["--from=environment /opt/motet /opt/motet"]
    installing = [run for run in file.final.all("RUN") if re.search("pip|apt", run)]
    installed = [re.findall(r"--no-install-recommends (.*?) +&& rm", run) for run in installing]
    assert installed == ([["gcc libc6-dev"]] if name == "runner" else [])


@every_deployable
def test_the_base_image_has_a_version_that_the_builder_may_choose(name: str) -> None:
    base = read(FOLDERS[name]).arguments["PYTHON"]
    assert re.fullmatch(r"python:3\.\d+-slim-[a-z]+", base)
    assert "latest" not in read(FOLDERS[name]).text


@every_deployable
def test_an_image_holds_its_extra_and_those_of_a_cluster(name: str) -> None:
    extras = read(FOLDERS[name]).extras
    assert extras[0] == name
    assert set(extras[1:]) <= OF_A_CLUSTER
    assert set(extras) <= pyproject()["project"]["optional-dependencies"].keys()


@every_deployable
def test_an_image_has_descriptive_labels(name: str) -> None:
    labels = read(FOLDERS[name]).final.labels
    assert labels["org.opencontainers.image.title"] == f"motet-{name}"
    assert labels["org.opencontainers.image.version"] == pyproject()["project"]["version"]
    assert labels["org.opencontainers.image.licenses"] == pyproject()["project"]["license"]
    assert read(FOLDERS[name]).final.last("EXPOSE").split() == [*filter(None, [PORTS.get(name)]), "9090"]


def test_dockerfiles_differ_only_in_their_deployable() -> None:
    """Six copies are read as one; what is put right in one is put right in all."""
    texts = set()
    for name, folder in FOLDERS.items():
        file = read(folder)
        text = file.text
        if name == "runner":  # torch comes first, from an index of its own
            text = re.sub(r"# An index.*?torch>=[^\n]*\n", "", text, flags=re.DOTALL)
            text = re.sub(r"# The kernels for.*?--install\n", "", text, flags=re.DOTALL)
            text = re.sub(r"# On a GPU, Triton.*?TRITON_CACHE_DIR=[^\n]*\n", "", text, flags=re.DOTALL)
            text = text.replace("RUN /opt/motet/bin/pip", "RUN python -m venv /opt/motet \\\n && /opt/motet/bin/pip")
        text = text.replace(file.final.labels["org.opencontainers.image.description"], "WHAT")
        text = text.replace(f"[{','.join(file.extras)}]", "[EXTRAS]")
        text = text.replace(f"{folder.relative_to(ROOT).as_posix()}/", "FOLDER/")
        text = text.replace(f'"{MODULES[name]}"', '"MODULE"')
        text = re.sub(rf"motet([/-]){name}", r"motet\1NAME", text)
        texts.add(re.sub(r"EXPOSE .*", "EXPOSE PORTS", text))
    (one,) = texts
    assert one.startswith("# WHAT. Built from the root of the repository:\n#   docker build --file FOLDER/Dockerfile")


def test_the_runner_takes_the_torch_that_the_package_asks_for() -> None:
    (torch,) = [one for one in pyproject()["project"]["optional-dependencies"]["runner"] if one.startswith("torch")]
    assert f'"{torch}"' in read(FOLDERS["runner"]).text


def test_the_runners_image_has_compiled_kernels_and_no_compiler_of_them() -> None:
    environment, final = read(FOLDERS["runner"]).stages[1:]
    install = environment.last("RUN")
    assert "apt-get install --yes --no-install-recommends g++" in install
    assert install.endswith("/opt/motet/bin/python -P -m motet_kernels.cpp --install")
    assert environment.instructions[-1] == ("RUN", install), "the kernels are those of the installed package"
    assert final.all("COPY") == ["--from=environment /opt/motet /opt/motet"], "they lie in the environment"
    assert builder.INSTALLED.parent == Path(sys.prefix)


def test_triton_finds_a_compiler_and_a_writable_folder_in_the_runners_image() -> None:
    final = read(FOLDERS["runner"]).final
    assert any("gcc libc6-dev" in run for run in final.all("RUN"))
    (cache,) = [rest.partition("=")[2] for rest in final.all("ENV") if rest.startswith("TRITON_CACHE_DIR=")]
    chart = (ROOT / "charts/motet/templates/runner.yaml").read_text()
    volume = re.search(r"- \{name: (\w+), mountPath: /tmp\}", chart)
    assert cache.startswith("/tmp/")
    assert volume is not None
    assert re.search(rf"- name: {volume[1]}\n *emptyDir: \{{\}}", chart), "the image itself is read-only"


def test_the_build_context_has_the_sources_of_the_wheel_and_little_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    needed = {folder.relative_to(ROOT).parts[0] for folder in package_folders()}
    project = pyproject()["project"]
    needed |= {"pyproject.toml", "constraints.txt", project["readme"], *project["license-files"]}
    assert let_in == needed
