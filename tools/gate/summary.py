"""Joins several runs of pytest into one closing line in its form, one exit status, and the slowest tests. Pure."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from xml.etree.ElementTree import Element

NOTHING_RAN = 5
"""pytest's exit status when no test was selected."""
ORDER = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning", "error", "rerun")
COUNTED_IN_PLURAL = ("warning", "error")
TEARDOWN_ERROR = "failed on teardown"
"""How the message of an error in a teardown begins in a JUnit report of pytest."""
CPU = "cpu_seconds"
"""The property of a test in a JUnit report, which cpu_plugin.py writes."""

_CLOSING = re.compile(r"^=* ?(?P<counts>(?:\d+ \w+(?:, )?)+|no tests ran) in [\d.]+s(?: \([\d:]+\))? ?=*$")


def counts_of(line: str) -> Counter[str] | None:
    """The counts in a closing line of pytest; None for any other line."""
    found = _CLOSING.match(line.strip())
    if found is None:
        return None
    counts = Counter[str]()
    for number, word in re.findall(r"(\d+) (\w+)", found["counts"]):
        counts[word.removesuffix("s") if word.removesuffix("s") in COUNTED_IN_PLURAL else word] += int(number)
    return counts


def closing_line(counts: Mapping[str, int], seconds: float, *, width: int = 80) -> str:
    said = [f"{counts[word]} {_plural(word, counts[word])}" for word in ORDER if counts.get(word)]
    hours, rest = divmod(int(seconds), 3600)
    clock = f" ({hours}:{rest // 60:02}:{rest % 60:02})" if seconds >= 60 else ""
    return f" {', '.join(said) or 'no tests ran'} in {seconds:.2f}s{clock} ".center(width, "=")


def exit_status(of_lanes: Sequence[int]) -> int:
    """One exit status for all lanes. A lane that selected no test counts only if all lanes selected none."""
    ran = [status for status in of_lanes if status != NOTHING_RAN]
    return max(ran, key=lambda status: (status != 0, abs(status))) if ran else NOTHING_RAN


def seconds_of_tests(report: Element) -> dict[str, float]:
    """The seconds of each test in a JUnit report of pytest, by the name with which pytest runs it."""
    seconds = defaultdict[str, float](float)
    for case in report.iter("testcase"):
        seconds[f"{_file(case)}::{case.get('name', '')}"] += float(case.get("time", 0))
    return dict(seconds)


def cpu_of_tests(report: Element) -> dict[str, float]:
    """The CPU seconds of each test in a JUnit report of pytest with cpu_plugin.py."""
    seconds = defaultdict[str, float](float)
    for case in report.iter("testcase"):
        for said in case.iterfind(f"properties/property[@name='{CPU}']"):
            seconds[f"{_file(case)}::{case.get('name', '')}"] += float(said.get("value", 0))
    return dict(seconds)


def seconds_of_files(tests: Mapping[str, float]) -> dict[str, float]:
    files = defaultdict[str, float](float)
    for name, seconds in tests.items():
        files[name.partition("::")[0]] += seconds
    return {name: round(seconds, 2) for name, seconds in sorted(files.items())}


def failed_tests(report: Element) -> list[str]:
    """The tests of a JUnit report that failed or could not be set up. A broken teardown alone does not count."""
    cases = [
        case
        for case in report.iter("testcase")
        if case.find("failure") is not None
        or any(not error.get("message", "").startswith(TEARDOWN_ERROR) for error in case.iter("error"))
    ]
    return [_as_typed(case) for case in cases]


def may_run_again(failed: Collection[str], counts: Mapping[str, int], max_files: int) -> bool:
    """Whether all failures are tests in at most `max_files` files. It counts files because one broken fixture fails all
    tests of its file. A test with a broken teardown never runs again."""
    files = {test.partition("::")[0] for test in failed}
    return 0 < len(files) <= max_files and len(failed) == counts.get("failed", 0) + counts.get("error", 0)


def passed_again(counts: Mapping[str, int], tests: int, failed: int) -> Counter[str]:
    """The counts after `tests` failed tests have passed in a rerun, as pytest counts them. `failed` of them fail all
    the same."""
    rest = Counter({word: count for word, count in counts.items() if word not in ("failed", "error")})
    return rest + Counter(passed=tests - failed, rerun=tests - failed, failed=failed)


def slowest(tests: Mapping[str, float], cpu: Mapping[str, float], count: int) -> Iterable[str]:
    for name, seconds in sorted(tests.items(), key=lambda one: -one[1])[:count]:
        yield f"{seconds:8.2f}s {cpu.get(name, 0):8.2f}s of CPU {name}"


def _file(case: Element) -> str:
    """The file that pytest runs. A report names the file with the function, which may be that of a base class."""
    names = case.get("classname", "").split(".")
    module = next((number for number, name in enumerate(names, 1) if name.startswith("test_")), 0)
    return "/".join(names[:module]) + ".py" if module else case.get("file", "")


def _as_typed(case: Element) -> str:
    """The name with which pytest runs a test, with its class if it has one."""
    file = _file(case)
    classes = case.get("classname", "").removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join([file, *filter(None, classes.split(".")), case.get("name", "")])


def _plural(word: str, count: int) -> str:
    return f"{word}s" if word in COUNTED_IN_PLURAL and count != 1 else word
