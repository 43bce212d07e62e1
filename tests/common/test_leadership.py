"""One leader at a time, and no term twice."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.errors import StateDirectoryError
from motet.leadership import LocalLeadership
from tests.support.surroundings import REAL

LEAD = """
import sys
from pathlib import Path
from motet.leadership import LocalLeadership
from motet.surroundings import real_surroundings

with LocalLeadership(Path(sys.argv[1]), real_surroundings()) as leadership:
    print(leadership.term, flush=True)
    sys.stdin.read()
"""


def other_process(path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LEAD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def term_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_each_term_is_above_the_last(tmp_path: Path) -> None:
    terms = []
    for _ in range(5):
        with LocalLeadership(tmp_path / "deep" / "term", REAL) as leadership:
            terms.append(leadership.term)
    assert terms == [1, 2, 3, 4, 5]


def test_while_one_process_leads_another_cannot(tmp_path: Path) -> None:
    path = tmp_path / "term"
    with other_process(path) as leader:
        first = term_of(leader)
        with pytest.raises(StateDirectoryError, match="another process already leads"), LocalLeadership(path, REAL):
            pass
        leader.send_signal(signal.SIGKILL)
        leader.wait()
        with LocalLeadership(path, REAL) as leadership:
            assert leadership.term > first


def test_a_refused_process_may_lead_later(tmp_path: Path) -> None:
    path = tmp_path / "term"
    second = LocalLeadership(path, REAL)
    with LocalLeadership(path, REAL) as first, pytest.raises(StateDirectoryError):
        second.__enter__()
    with second:
        assert second.term == first.term + 1


@given(st.integers(min_value=0, max_value=2**40), st.integers(min_value=0, max_value=2**40))
def test_a_term_exceeds_what_others_have_seen(tmp_path_factory: pytest.TempPathFactory, seen: int, later: int) -> None:
    path = tmp_path_factory.mktemp("lead") / "term"
    with LocalLeadership(path, REAL) as leadership:
        own = leadership.term
        terms = []
        for one in (seen, later):
            leadership.raise_term_above(one, lambda: terms.append(leadership.term))
        assert terms == [max(own, seen + 1), max(own, seen + 1, later + 1)]
        last = leadership.term
    with LocalLeadership(path, REAL) as leadership:
        assert leadership.term == last + 1


@pytest.mark.parametrize(
    "garbage", [b"junk", b"-3\n", b"\0" * 32, b"0x10", "١٢".encode(), b"%d" % (2**64 - 1)], ids=repr
)
def test_a_damaged_file_never_gives_a_term_again(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "term"
    terms = []
    for _ in range(3):
        with LocalLeadership(path, REAL) as leadership:
            terms.append(leadership.term)
    path.write_bytes(garbage)
    for _ in range(2):
        with LocalLeadership(path, REAL) as leadership:
            terms.append(leadership.term)
    assert terms == sorted(set(terms))
