"""Which package compiles grammars in the engine's process."""

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from motet_runner.external.vllm.grammar_package import NAME, VARIABLE, service_package, use_package, withhold_package


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
