"""Adapters that have left the device load again from the host's memory."""

import shutil
from pathlib import Path

import pytest

from motet.domain import Digest
from motet_runner.adapters.certification import certify
from motet_runner.engine import Engine
from motet_runner.interface import AdapterLoaded
from tests.runner.engines import EngineRun, ask, make_engine, run

A, B, C = map(Digest, "ABC")
PROMPT = list(range(5, 25))


def known(engine: Engine, digest: Digest, folder: Path) -> None:
    """The engine knows where it is, and nothing of it is read yet: another one has the only place."""
    engine.load_adapter(digest, certify(folder, engine.info).layout)


def answer(engine: Engine, digest: Digest) -> tuple[list[int], EngineRun]:
    ran = run(engine, ask("q", adapter=digest, prompt=PROMPT))
    engine.check()
    return ran.tokens["q"], ran


@pytest.fixture
def folders(adapters: list[Path], tmp_path: Path) -> list[Path]:
    return [Path(shutil.copytree(one, tmp_path / one.name)) for one in adapters]


def test_what_was_removed_from_the_disk_answers_the_same_from_host_memory(llama: Path, folders: list[Path]) -> None:
    engine = make_engine(llama, max_resident_adapters=1, host_adapters_mib=8)
    known(engine, A, folders[0])
    known(engine, B, folders[1])
    before, ran = answer(engine, A)
    assert [(one.from_host, one.in_host) for one in ran.of(AdapterLoaded) if one.digest == A] == [(False, True)]
    other, _ = answer(engine, B)
    assert before != other
    shutil.rmtree(folders[0])
    after, ran = answer(engine, A)
    assert after == before
    assert [(one.from_host, one.in_host) for one in ran.of(AdapterLoaded)] == [(True, True)]
    assert engine.report().host_adapters == 2
