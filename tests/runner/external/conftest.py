import pytest

from motet_runner.adapters.certification import EngineLimits, certify
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.external.vllm.linears import linears_of
from tests.runner.random_models import RandomAdapter, save_adapter, save_base


@pytest.fixture(scope="session")
def layout(tmp_path_factory: pytest.TempPathFactory) -> AdapterLayout:
    folder = tmp_path_factory.mktemp("layout")
    base = save_base("llama", folder / "base")
    adapter = save_adapter(base, "llama", RandomAdapter(4, 8), folder / "adapter", seed=1)
    return certify(adapter, EngineLimits(linears_of(base), 64, "float32")).layout
