"""The changes that docs/architecture.md explains, made in a copy of the tree: what the page says is all that is needed.

`tests/common` does the same with an option of sampling and a source of adapters, which reach many doors.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
        for path in tracked():
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
        (self.folder / path).write_text(text)

    def run(self, *command: str | Path) -> str:
        """What it says; it must succeed."""
        roots = {str(self.folder / folder.parent.relative_to(ROOT)) for folder in package_folders()}
        done = subprocess.run(
            [sys.executable, *command],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(self.folder), *sorted(roots)])},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def test(self, *what: str) -> str:
        return self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", self.folder, *what)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "copy")


def test_the_page_has_five_examples() -> None:
    assert [name.partition(",")[0].rstrip(":") for name in EXAMPLES] == [
        "option of sampling",
        "reason of a condition",
        "metric",
        "source of adapters",
        "back end of `add_lora`",
    ]
    assert {"sampling.py", "runner.proto"} <= named("option of sampling").keys()  # tests/common/test_sampling.py
    assert "sources.py" in named("source of adapters")  # tests/common/test_sources.py


def test_a_new_reason_and_a_new_metric_reach_their_pages(copy: Copy, tmp_path: Path) -> None:
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
    copy.run("tools/generate_docs.py", "--out", tmp_path)
    for example, page, row in [
        ("reason of a condition", "conditions.md", "| `OnMars` | It is far. Bring it back. |"),
        ("metric", "metrics.md", "| `motet_of_mars_total` | counter |  | Of Mars. |"),
    ]:
        assert page in named(example)
        assert row in (tmp_path / page).read_text()
        assert row not in (DOCS / "reference" / page).read_text()
    copy.test("tests/operator/reconcile/test_reasons.py", "tests/docs/test_troubleshooting.py")


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


def test_a_new_back_end_adds_adapters_and_leaves_the_rest_to_torch(copy: Copy) -> None:
    of_back_end = named("back end of `add_lora`")
    copy.add(of_back_end["torch_backend.py"].with_name("slow_backend.py"), BACK_END)
    copy.add(of_back_end["compiled.py"].with_name("slow.py"), ITS_FUNCTION)
    copy.change(of_back_end["which_kernels.py"], 'KNOWN = ("auto", ', 'KNOWN = ("auto", "slow", ')
    choice = of_back_end["kernel_choice.py"]
    copy.change(choice, "\nlog = ", "from motet_runner.execute.kernels.slow import slow_back_end\n\nlog = ")
    copy.change(
        choice,
        '        if policy.asked == "exact":\n',
        '        if policy.asked == "slow":\n            self.serving = _with_torch(slow_back_end())\n'
        '        if policy.asked == "exact":\n',
    )
    assert copy.run("-c", SERVES).split("\n")[:2] == ["slow + torch", "torch"]
    its_test = of_back_end["test_add_lora.py"]
    copy.change(
        its_test,
        "from motet_kernels.cpp import",
        "from motet_kernels.slow_backend import SlowBackend\nfrom motet_kernels.cpp import",
    )
    copy.change(its_test, "self.backend = TorchBackend(", "self.backend = SlowBackend(")
    copy.test(str(its_test), "-k", "test_rows_without_an_adapter or (test_matches_the_reference and zipf)")
