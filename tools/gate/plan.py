"""Decides what `make test` runs, in which lanes, and what is left out and why. Pure: takes facts, returns a plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LANES = {
    "cluster": ("tests/kube",),
    "releases": ("tests/kube/releases/installed", "tests/kube/releases/test_pages.py"),
    "engine": ("tests/runner",),
    "services": ("tests/gateway", "tests/runner_service", "tests/contract"),
    "stack": ("tests/stack",),
    "rest": ("tests",),
    "simulator": ("tests/simulator", "tests/docs"),
    "kernels": ("tests/kernels",),
    "benchmarks": ("tests/benchmarks",),
    "images": ("tests/images",),
}
"""The lanes in the order in which they begin. The longest are first, so that none of them runs alone at the end, when
half of the CPU has nothing to do. Lanes that mostly wait (releases, cluster, stack) run beside others that compute.
If a lane names a folder inside the folder of another lane, only the former runs it. Each lane of tests/kube has its own
control plane."""
OF_A_CLUSTER = "tests/kube"
SIDE_BY_SIDE = 3
"""How many lanes run at a time. Two would not keep two cores busy, since tests wait for processes."""
IN_FILE_ORDER = ("-p", "no:randomly")
"""Tests of a cluster run in file order: those of a module share one installation, and all share one control plane. In a
random order, they would fail because of what other tests leave behind. All other tests run in random order."""
BUILD_MINUTES = 8


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """What is known about the machine before anything runs."""

    missing_tools: tuple[str, ...] = ()
    """Kubernetes tools that are not built on this machine."""
    go: bool = True
    root: bool = True
    own_cluster: bool = True
    """False if the tests use the caller's cluster."""
    strict: bool = False
    """True if CI is set: a test that lacks something fails instead of being skipped."""


@dataclass(frozen=True)
class Lane:
    """One run of pytest."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class RunPlan:
    lanes: tuple[Lane, ...]
    build: bool = False
    """Whether Kubernetes tools are built first."""
    notes: tuple[str, ...] = ()
    """What is left out and why, and what takes long before the first test."""
    whole: bool = True
    """Whether all tests were asked for, not a part of them."""

    @property
    def kind(self) -> str:
        """Runs of one kind take about the same time."""
        return "+".join(lane.name for lane in self.lanes)


def plan(machine: MachineFacts, *, kube: bool = True, asked: Sequence[str] = (), paths: bool = False) -> RunPlan:
    """`asked` is passed to pytest. If it names paths, `paths` is true and one lane runs them."""
    marks = "not soak" if kube else "not soak and not kube"
    common = ("-m", marks)
    notes = ["Left out: tests marked soak, which run for hours (make soak)."]
    if not kube:
        notes.append("Left out: the tests of a cluster, in tests/kube (KUBE=no).")
    build = kube and machine.go and bool(machine.missing_tools)
    if kube:
        notes += _about_the_cluster(machine)
    if paths:
        return RunPlan((Lane("asked", (*common, *asked)),), build, tuple(notes), whole=False)
    without = () if kube else (OF_A_CLUSTER,)
    lanes = []
    for name, named in LANES.items():
        if own := [path for path in _elsewhere(named, without) if path not in without]:
            order = IN_FILE_ORDER if own[0].startswith(OF_A_CLUSTER) else ()
            others = [path for paths in LANES.values() for path in paths if path not in own]
            lanes.append(Lane(name, (*common, *asked, *order, *own, *_all_but([*others, *without], own))))
    return RunPlan(tuple(lanes), build, tuple(notes), not asked)


def alone(tests: Sequence[str]) -> Lane:
    """The lane that runs failed tests once more, with nothing beside them: some fail only on a busy machine."""
    return Lane("again", tuple(tests))


def _all_but(paths: Sequence[str], folders: Sequence[str]) -> list[str]:
    below = _below(paths, folders)
    return [f"--ignore={path}" for path in below if not _below([path], below)]


def _below(paths: Sequence[str], folders: Sequence[str]) -> list[str]:
    return [path for path in paths if any(path.startswith(f"{folder}/") for folder in folders)]


def _elsewhere(paths: Sequence[str], folders: Sequence[str]) -> list[str]:
    return [path for path in paths if path not in _below(paths, folders)]


def _about_the_cluster(machine: MachineFacts) -> Iterable[str]:
    end = "fail, because CI is set" if machine.strict else "are left out"
    if machine.missing_tools and machine.go:
        yield (
            f"First: build {', '.join(machine.missing_tools)} from source, because this machine lacks them. All tools "
            f"take about {BUILD_MINUTES} minutes, once. KUBE=no leaves out the tests of a cluster."
        )
    elif machine.missing_tools:
        tools = ", ".join(machine.missing_tools)
        yield f"The tests that need {tools} {end}: Go, which builds them, is not installed (make kube says more)."
    if machine.own_cluster and not machine.root:
        yield f"The tests of a cluster {end}: they run in a network namespace of their own, which only root may make."


@dataclass(frozen=True)
class RunRecord:
    """What a run has stored for the next one."""

    seconds: float
    lanes: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, float] = field(default_factory=dict)
    """The seconds of each file of tests."""
    cpu_lanes: Mapping[str, float] = field(default_factory=dict)
    cpu_files: Mapping[str, float] = field(default_factory=dict)


def announced(chosen: RunPlan, last: RunRecord | None) -> list[str]:
    """The lines that are printed before the first test."""
    lanes = [
        f"Lane {lane.name}: pytest {' '.join(map(_quoted, lane.arguments))}{_took(lane.name, last)}"
        for lane in chosen.lanes
    ]
    if last is not None:
        lanes.append(f"Last time it took {spelled(last.seconds)} in all.")
    elif chosen.whole:
        lanes.append("How long it takes is not known: these tests have never been run to the end on this machine.")
    return [*lanes, *chosen.notes]


def _took(lane: str, last: RunRecord | None) -> str:
    return f"  ({spelled(last.lanes[lane])} last time)" if last is not None and lane in last.lanes else ""


def _quoted(word: str) -> str:
    return f"'{word}'" if " " in word else word


def spelled(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
