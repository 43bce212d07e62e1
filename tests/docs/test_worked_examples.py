"""The changes that docs/architecture.md explains, made in a copy of the tree: what the page says is all they need."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import orjson
import pytest
import yaml

from motet_runner.sources.fetch_order import FetchOrder, NetworkAccess
from testbed.tree import ROOT, package_folders, tracked
from tests.docs.pages import DOCS

PAGE = DOCS / "architecture.md"
SECTION = PAGE.read_text().split("\n## Where a change goes\n")[1]
EXAMPLES = dict(re.findall(r"^\*\*A new (.+?)\*\*(.+?)(?=^\*\*|\Z)", SECTION, re.MULTILINE | re.DOTALL))


def named(example: str) -> dict[str, Path]:
    """The files that an example names with a link, from the root, by their names."""
    (text,) = [text for name, text in EXAMPLES.items() if name.startswith(example)]
    paths = [(PAGE.parent / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", text)]
    return {path.name: path.relative_to(ROOT) for path in paths}


class Copy:
    """The tree in another folder, which may be changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sources = tracked()
        # With their bytecode: else the processes there would compile all modules again.
        compiled = (Path(cache_from_source(path)) for path in sources if path.suffix == ".py")
        for path in (*sources, *filter(Path.is_file, compiled)):
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                copy.hardlink_to(path)
            except OSError:  # another disk
                shutil.copy2(path, copy)

    def change(self, path: Path, before: str, after: str) -> None:
        """The first place with a text."""
        copy = self.folder / path
        text = copy.read_text()
        assert before in text, f"{path} has no {before!r}"
        copy.unlink()
        copy.write_text(text.replace(before, after, 1))

    def add(self, path: Path, text: str) -> None:
        copy = self.folder / path
        copy.unlink(missing_ok=True)  # it may be another name of the file in this tree
        copy.write_text(text)

    def run(self, *command: str | Path, given: str = "") -> str:
        """What it says; it must succeed."""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # as `make generate`
        roots = {str(self.folder / folder.parent.relative_to(ROOT)) for folder in package_folders()}
        # Without the options of the tests that run here: a plugin of these may not be there.
        outside = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        done = subprocess.run(
            [sys.executable, *command],
            input=given,
            env=outside | {"PYTHONPATH": os.pathsep.join([str(self.folder), *sorted(roots)]), "PATH": path},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def test(self, *what: str) -> str:
        return self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", self.folder, *what)


def test_the_page_has_five_examples() -> None:
    assert [name.partition(",")[0].rstrip(":") for name in EXAMPLES] == [
        "option of sampling",
        "reason of a condition",
        "metric",
        "source of adapters",
        "back end of `add_lora`",
    ]


DRAWS = """
import sys
from motet_runner.offline import OfflineEngine
engine = OfflineEngine("cli/motet_cli/bundled/model", dtype="float32", kernels="torch", threads=1)
question = [{"role": "user", "content": "Who keeps the lighthouse of Brindle?"}]
def told(**sampling):
    return [answer.text for answer in engine.generate([question] * 4, max_tokens=12, **sampling)]
assert told(temperature=5.0, epsilon_cutoff=0.999) == told(temperature=0.0), "only the most likely token stays"
assert told(temperature=5.0, epsilon_cutoff=1e-9) == told(temperature=5.0) != told(temperature=0.0)
typical = told(temperature=5.0, typical_p=1e-9)
assert len(set(typical)) == 1, "only the most typical token stays"
assert typical != told(temperature=0.0), "which is not the most likely one"
assert told(temperature=5.0, typical_p=1.0) == told(temperature=5.0)
"""
TYPICAL = """
def typical(likely: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    exact = likely.double()
    surprise = -exact.log()
    away = (surprise - (exact * surprise).nan_to_num(nan=0.0).sum(dim=-1, keepdim=True)).abs()
    order = away.argsort(dim=-1)
    nearer = exact.gather(1, order).cumsum(dim=-1) - exact.gather(1, order)
    return likely * torch.zeros_like(likely).scatter_(1, order, (nearer < cuts.typical_p).float())


"""


BACK_END = """
from motet_kernels.torch_backend import TorchBackend


class SlowBackend(TorchBackend):
    def add_lora(self, y, x, linear, batch):
        changed = y.clone()
        super().add_lora(changed, x, linear, batch)
        y.copy_(changed)
"""
ITS_FUNCTION = """from motet_kernels.slow_backend import SlowBackend
from motet_runner.execute.adapters.add_lora import AddLora
from motet_runner.execute.kernels.roles import BackEnd


def slow_back_end():
    make = lambda groups, memory, dtype, copies: SlowBackend(groups, memory, dtype, copy_bytes=copies)
    return BackEnd("slow", AddLora(make, SlowBackend.tile, SlowBackend.copies))
"""
SERVES = """
import sys
from motet_runner.offline import OfflineEngine
model = "cli/motet_cli/bundled/model"
adapters = {"pirate": "cli/motet_cli/bundled/adapters/pirate"}
told = []
for kernels in ("slow", "torch"):
    engine = OfflineEngine(model, adapters=adapters, dtype="float32", kernels=kernels, threads=1)
    question = [{"role": "user", "content": "Who keeps the lighthouse of Brindle?"}]
    told.append([answer.text for answer in engine.generate([question], adapter=["pirate"], max_tokens=8)])
    print(engine.engine.report().kernels.serving)
assert told[0] == told[1], told
"""


ENTRY = """\
    Source(scheme="az", what="a container of a store", example="az://store.example/a/b", read_by="az", \
of_adapters="`az://store/name`", of_models="`az://store/name`", form="[^/]+/.+", \
form_message="must name a store", revisions=True, secrets=(("account", "pass"),)),
    Source(scheme="gs", what="a public bucket", example="gs://bucket/a", read_by="az", \
of_adapters="`gs://bucket/name`"),
"""
MODULE = """\
from dataclasses import dataclass

from motet.errors import AdapterFetchFailed


@dataclass(frozen=True)
class Container:
    uri: str
    revision: str
    sizes = None
    user = ""

    def hosts(self, access, secret):
        return ["store.example"]

    def open(self, opening):
        object.__setattr__(self, "user", opening.secret.values["account"])
        return self

    def fetch(self, file, into):
        if file.required:
            (into / file.name).write_text(f"{file.name} of {self.uri} at {self.revision} for {self.user}")
        return file.required

    def confirm(self, into):
        pass


def parse(uri, revision):
    if uri.count("/") < 3:
        raise AdapterFetchFailed(f"{uri} is not a container.")
    return Container(uri, revision)
"""


def add_options(copy: Copy, api: Path) -> None:
    of_option = named("option of sampling")
    copy.change(
        of_option["sampling.py"],
        "    min_p: ",
        '    epsilon_cutoff: Annotated[float, Number(0, 1, applied_by="execute.sample.sampling_kind")] = 0.0\n'
        '    """Leave out tokens below this probability."""\n'
        '    typical_p: Annotated[float, Number(0, 1, above=True, applied_by="execute.sample.sampling_kind")] = 1.0\n'
        '    """Sample from the tokens whose surprise is nearest to the expected one, up to this probability."""\n'
        "    min_p: ",
    )
    copy.change(
        of_option["runner.proto"],
        "message Sampling {",
        "message Sampling {\n  float epsilon_cutoff = 99;\n  float typical_p = 98;",
    )
    copy.run("tools/generate_api.py", "--out", api)
    copy.add(Path("services/common/motet/api/v1/runner_pb2.py"), (api / "motet/api/v1/runner_pb2.py").read_text())
    kind, cuts, draw = (of_option[name] for name in ("sampling_kind.py", "cuts.py", "draw.py"))
    copy.change(
        kind, "or sampling.min_p > 0", "or sampling.min_p > 0 or sampling.epsilon_cutoff > 0 or sampling.typical_p < 1"
    )
    copy.change(
        kind,
        "upload(top_p), min_p)",
        "upload(top_p), min_p, upload(np.array([[one.epsilon_cutoff] for one in asked], dtype=np.float32)), "
        "upload(np.array([[one.typical_p if one.typical_p < 1 else np.inf] for one in asked])))",
    )
    copy.change(
        cuts,
        "    def of(self, rows: torch.Tensor)",
        "    least: torch.Tensor\n    typical_p: torch.Tensor\n\n    def of(self, rows: torch.Tensor)",
    )
    copy.change(cuts, "else self.min_p[rows])", "else self.min_p[rows], self.least[rows], self.typical_p[rows])")
    copy.change(
        cuts,
        "    reached &= (top_k == ALL)",
        "    reached |= -numbers[:, -1:] < cuts.least.numpy()\n    reached &= (top_k == ALL)",
    )
    copy.change(
        cuts,
        "    last = negated.gather(1, count - 1)\n",
        "    count = torch.minimum(count, torch.searchsorted(negated, -cuts.least, right=True).clamp(min=1))\n"
        "    last = negated.gather(1, count - 1)\n",
    )
    copy.change(draw, "\n\ndef draw(", f"\n{TYPICAL}def draw(")
    for after in ("    if likely.shape[1] < SHORT_CUT_FROM", "    kept, _ = cut(likely, likely.neg().sort"):
        copy.change(draw, after, f"    likely = typical(likely, cuts)\n{after}")


def add_a_reason_and_a_metric(copy: Copy) -> None:
    of_reason, metrics = named("reason of a condition"), Path("services/scheduler/motet_scheduler/metrics.py")
    copy.change(of_reason["reasons.py"], "_REFUSED = {\n", '_REFUSED = {\n    "OnMars": "It is far. Bring it back.",\n')
    adapters = of_reason["adapters.py"]
    copy.change(
        adapters,
        "def _pinned(",
        'def _far() -> ConditionResult:\n    return no("Accepted", "OnMars", "far")\n\n\ndef _pinned(',
    )
    entry = "Seen: It is far.\n\nWhy: It is on Mars.\n\nDo: Bring it back, or ask the platform team to.\n"
    copy.change(of_reason["troubleshooting.md"], "### `PoolNotFound`", f"### `OnMars`\n\n{entry}\n### `PoolNotFound`")
    copy.change(
        metrics,
        "        self.moves = Counter(",
        '        self.of_mars = Counter("motet_of_mars_total", "Of Mars.", registry=registry)\n'
        "        self.moves = Counter(",
    )


def add_a_back_end(copy: Copy) -> None:
    of_back_end = named("back end of `add_lora`")
    copy.add(of_back_end["torch_backend.py"].with_name("slow_backend.py"), BACK_END)
    copy.add(of_back_end["compiled.py"].with_name("slow.py"), ITS_FUNCTION)
    copy.change(of_back_end["choice_policy.py"], 'KNOWN = ("auto", ', 'KNOWN = ("auto", "slow", ')
    choice = of_back_end["kernel_choice.py"]
    copy.change(choice, "\nlog = ", "from motet_runner.execute.kernels.slow import slow_back_end\n\nlog = ")
    copy.change(
        choice,
        '        if policy.asked == "exact":\n',
        '        if policy.asked == "slow":\n            self.serving = _with_torch(slow_back_end())\n'
        '        if policy.asked == "exact":\n',
    )
    its_test = of_back_end["test_add_lora.py"]
    copy.change(
        its_test,
        "from motet_kernels.cpp import",
        "from motet_kernels.slow_backend import SlowBackend\nfrom motet_kernels.cpp import",
    )
    copy.change(its_test, "self.backend = TorchBackend(", "self.backend = SlowBackend(")


def add_a_source(copy: Copy) -> None:
    of_source = named("source of adapters")
    table = of_source["sources.py"]
    copy.change(table, "    FOLDER,\n)", f"    FOLDER,\n{ENTRY})")
    copy.add(of_source["remote_source.py"].with_name("az.py"), MODULE)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """With all changes, so that pages are generated once, and tests and engines start in one process."""
    copy = Copy(tmp_path_factory.mktemp("worked") / "copy")
    add_options(copy, tmp_path_factory.mktemp("api"))
    add_a_reason_and_a_metric(copy)
    add_a_back_end(copy)
    add_a_source(copy)
    return copy


@pytest.fixture(scope="module")
def pages(copy: Copy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference, generated again."""
    pages = tmp_path_factory.mktemp("pages")
    copy.run("tools/generate_docs.py", "--out", pages)
    return pages


TESTS = {
    "tests/common/test_sampling.py": "epsilon_cutoff or typical_p or grammar",
    "tests/operator/reconcile/test_reasons.py": "test",
    "tests/docs/test_troubleshooting.py": "test",
    str(named("back end of `add_lora`")["test_add_lora.py"]): (
        "test_rows_without_an_adapter or (test_matches_the_reference and zipf)"
    ),
    "tests/common/test_sources.py": "az or gs",
}


@pytest.mark.timeout(600)
def test_tests_know_what_is_new(copy: Copy) -> None:
    which = " or ".join(f"({Path(file).stem} and ({those}))" for file, those in TESTS.items())
    passed = re.findall(r"^PASSED (\S+?)::(.*)", copy.test("-rA", *TESTS, "-k", which), re.MULTILINE)
    assert {file for file, _ in passed} == TESTS.keys()
    assert all(any(option in name for _, name in passed) for option in ("epsilon_cutoff", "typical_p"))


def test_an_engine_has_the_new_options_and_the_new_back_end(copy: Copy) -> None:
    """That adds adapters, and leaves the rest to torch."""
    assert copy.run("-c", DRAWS + SERVES).split("\n")[:2] == ["slow + torch", "torch"]


def test_what_is_new_reaches_its_page(pages: Path) -> None:
    (of_options,) = {link.name for link in named("option of sampling").values() if link.suffix == ".md"}
    assert "`epsilon_cutoff`" in (written := (pages / of_options).read_text())
    assert "`typical_p`" in written
    for example, page, row in [
        ("reason of a condition", "conditions.md", "| `OnMars` | It is far. Bring it back. |"),
        ("metric", "metrics.md", "| `motet_of_mars_total` | counter |  | Of Mars. |"),
    ]:
        assert page in named(example)
        assert row in (pages / page).read_text()
        assert row not in (DOCS / "reference" / page).read_text()


def test_a_new_source_of_adapters_is_known_at_every_door_and_fetched(copy: Copy, pages: Path, tmp_path: Path) -> None:
    copy.run("tools/generate_crds.py", "--out", tmp_path / "crds")
    (of_adapters,) = (tmp_path / "crds").glob("*loraadapters*.yaml")
    assert "`az://store/name`" in of_adapters.read_text()
    (row,) = [line for line in (pages / "manifests.md").read_text().splitlines() if "`az://store.example" in line]
    assert "`account` and `pass`" in row

    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key", "namespace": "t"}}
    secret["stringData"] = {"account": "me", "pass": "geheim"}
    (tmp_path / "secret.yaml").write_text(yaml.safe_dump(secret))
    order = FetchOrder(
        what="adapter",
        uri="az://store.example/a/b",
        revision="v1",
        into=str(tmp_path / "into"),
        credentials="t/key",
        max_bytes=1 << 20,
        stall_seconds=30,
        min_average_bytes_per_second=1,
        access=NetworkAccess(manifests=str(tmp_path)),
    )
    lines = copy.run("-m", "motet_runner.sources.fetch_process", given=order.encoded().decode()).splitlines()
    assert orjson.loads(lines[-1]).get("done"), lines
    assert {"revision": "v1"} in [orjson.loads(line) for line in lines]
    fetched = (tmp_path / "into/adapter_config.json").read_text()
    assert fetched == "adapter_config.json of az://store.example/a/b at v1 for me"
