"""`motet workload`, `motet profile` and `motet plan` with what cannot be: the real commands, in this process."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from motet_cli import main as command
from motet_simulator.workloads.jsonl import line_of
from tests.simulator.setups import profile, workload


@dataclass(frozen=True)
class Done:
    status: int
    stdout: str
    stderr: str


Motet = Callable[..., Done]


@pytest.fixture
def motet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Motet:
    """In a folder with a workload and a profile."""
    monkeypatch.chdir(tmp_path)
    Path("workload").write_text("".join(line_of(one) + "\n" for one in workload(4, 40, rate=5)))
    profile().write(Path("profile"))

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["motet", *arguments])
        with pytest.raises(SystemExit) as ended:
            command.main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, said.out, said.err)

    return run


PLAN = ("plan", "--trace", "workload", "--profile", "profile", "--machine", "a machine", "--seeds", "1", "--slo")
MAKE = ("workload", "make", "--requests", "3")
LAW = ("profile", "law", "fixed=8ms", "--kv-tokens")


def test_a_place_for_the_plot_that_is_none_is_refused_before_anything_is_simulated(
    motet: Motet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("motet_cli.plan_commands.Search")
    done = motet(*PLAN, "ttft=1s", "--plot", "missing/plan.svg")
    assert (done.status, done.stderr) == (2, "motet: missing/plan.svg: No such file or directory.\n")


@pytest.mark.parametrize(
    "arguments", [(*MAKE, "--rate", "1"), (*LAW, "4000"), ("workload", "convert", "workload")], ids=lambda one: one[1]
)
@pytest.mark.parametrize("output", ["missing/file", ".", "workload/file"])
def test_an_output_file_that_cannot_be_written_is_named(motet: Motet, arguments: tuple[str, ...], output: str) -> None:
    before = set(Path().iterdir())
    done = motet(*arguments, "-o", output)
    assert done.status == 2
    assert done.stderr.startswith(f"motet: {output}: ")
    assert set(Path().iterdir()) == before


def test_what_is_not_written_whole_leaves_what_was_there(motet: Motet) -> None:
    Path("bad").write_text(line_of(next(workload(1, 1, rate=1))) + "\n{\n")
    Path("output").write_text("before")
    Path("link").symlink_to("output")
    before = set(Path().iterdir())
    assert motet("workload", "convert", "bad", "-o", "output").status == 2
    assert (Path("output").read_text(), set(Path().iterdir())) == ("before", before)
    assert motet("workload", "convert", "workload", "-o", "link").status == 0
    assert Path("link").is_symlink()
    assert len(Path("output").read_text().splitlines()) == 40


def test_a_device_is_written_to_and_stays_one(motet: Motet) -> None:
    assert motet(*MAKE, "--rate", "1", "-o", "/dev/null").status == 0
    assert Path("/dev/null").is_char_device()
    assert motet(*MAKE, "--rate", "1", "-o", "/dev/full").stderr == "motet: /dev/full: No space left on device.\n"


@pytest.mark.parametrize(
    "arguments",
    [
        (*PLAN, "ttft=1s", "--adapters", "1000000000"),
        (*PLAN, "ttft=1s", "--runners", "100000000"),
        (*PLAN, "ttft=1s", "--rate", "inf"),
        (*PLAN, "ttft=1s", "--speed", "inf"),
        (*PLAN, "ttft=1s", "--speed", "nan"),
        (*PLAN, "ttft=1s", "--percent", "nan"),
        (*PLAN, "ttft=1s", "--requests", "1" + "0" * 30),
        (*PLAN, "ttft=1s", "--max-tokens", "1" + "0" * 30),
        (*MAKE, "--rate", "nan"),
        (*MAKE, "--rate", "1", "--prompt", "1e300"),
        (*MAKE, "--rate", "1", "--answer", "nan"),
        (*MAKE, "--rate", "1", "--requests", "1000000000"),
        (*LAW, "1" + "0" * 30, "-o", "new"),
        (*LAW, "4000", "--adapter-slots", "1" + "0" * 30, "-o", "new"),
    ],
    ids=lambda one: " ".join(one[-2:])[:30],
)
def test_a_number_out_of_its_bounds_is_refused(motet: Motet, arguments: tuple[str, ...]) -> None:
    done = motet(*arguments)
    assert done.status == 2
    assert done.stderr
    assert not Path("new").exists()


@pytest.mark.parametrize(
    "option", ["kv-tokens", "max-sequences", "max-model-length", "adapter-slots", "adapter-tokens"]
)
@pytest.mark.parametrize("value", ["0", "-1", "1e30", "nan", "", "1" + "0" * 30])
def test_an_error_about_a_number_of_an_engine_names_its_option(motet: Motet, option: str, value: str) -> None:
    done = motet(*LAW, "4000", f"--{option}", value, "-o", "new")
    assert done.status == 2
    assert f"--{option}" in done.stderr
    assert not Path("new").exists()


@pytest.mark.parametrize("option", ["--runners", "--most-runners"])
def test_runners_whose_pages_would_fill_the_memory_are_refused(motet: Motet, option: str) -> None:
    assert motet(*LAW, str(1 << 26), "-o", "profile").status == 0
    done = motet(*PLAN, "ttft=1s", "--anyway", option, "17")
    assert done.status == 2
    assert f"{option} 17: profile is of runners with 4,194,304 pages each" in done.stderr
    assert "Choose a number from 1 to 16." in done.stderr


def test_a_plan_says_whose_profile_it_is_by(motet: Motet) -> None:
    said = json.loads(motet(*PLAN, "ttft=1s", "--json").stdout)
    assert said["profile"] == {"machine": "a machine", "model": "a model", "kernels": "some kernels"}
    done = motet(*PLAN, "ttft=1s", "--kernels", "others")
    assert (done.status, "of the kernels 'some kernels', and the plan is for 'others'" in done.stderr) == (2, True)
