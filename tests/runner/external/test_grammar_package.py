"""Which package compiles grammars in the engine's process."""

import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from motet.errors import StructuredOutputUnavailable
from motet.grammars.grammar import ANY_OBJECT, Grammar, GrammarForm
from motet_runner.external.vllm.__main__ import VARIABLES, load
from motet_runner.external.vllm.grammar_package import NAME, VARIABLE, service_package, use_package, withhold_package
from motet_runner.external.vllm.trial import Trial
from motet_runner.interface import EngineConfig
from testbed.tree import ROOT
from tests.runner.engines import ask
from tests.runner.external.fake_driven import FakeDriven, facts

MODEL = ROOT / "cli" / "motet_cli" / "bundled" / "model"


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
            del sys.modules[name]
        yield


def test_the_engines_process_has_the_services_package() -> None:
    folder = service_package()[VARIABLE]
    assert use_package(folder)
    assert Path(sys.modules[NAME].__file__ or "").parent == Path(folder)


def test_where_it_cannot_be_loaded_vllm_has_its_own_and_nobody_else_has_one(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("import no_such_module")
    for folder in ("", str(tmp_path), str(tmp_path / "nothing")):
        assert not use_package(folder)
        assert NAME not in sys.modules, "vLLM would find this instead of its own"
    import llguidance

    assert llguidance is sys.modules[NAME]
    withhold_package()
    with pytest.raises(ImportError):
        import llguidance


def test_an_engine_with_vllms_own_package_serves_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    def surface(_: EngineConfig) -> FakeDriven:
        importlib.import_module(NAME)  # as vLLM does
        return FakeDriven(facts(vocabulary=1536))

    monkeypatch.setitem(sys.modules, "motet_runner.external.vllm.surface", Mock(Surface=surface))
    monkeypatch.setattr(Trial, "run", lambda _: {})
    monkeypatch.setattr(os, "dup2", Mock())
    for name in ("motet.grammars.compiler", "motet.grammars.kept", "motet_runner.external.vllm.load_vllm"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # as in a new process
    for name in (VARIABLE, *VARIABLES):
        monkeypatch.setenv(name, "")
    engine = load(EngineConfig(model=MODEL), lambda *_: None)
    with pytest.raises(StructuredOutputUnavailable):
        engine.mask_of(replace(ask("q"), grammar=Grammar(GrammarForm.JSON_SCHEMA, ANY_OBJECT)))
