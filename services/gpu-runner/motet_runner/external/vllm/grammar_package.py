"""The package that compiles grammars in the engine's process is the service's own.

vLLM's environment has an older one, which allows other texts for some schemas. An answer that moves between runners
with vLLM and with Motet's engine must stay within one grammar, and gateways try grammars with ours. It is for any
version of Python. The environment stays as it is: only this process has ours.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

NAME = "llguidance"
VARIABLE = "MOTET_ENGINE_LLGUIDANCE"
"""Of the engine's process: the package's folder"""


def service_package() -> dict[str, str]:
    """In the service: what its engine's environment gets. Empty: the service has none, so no runner serves grammars."""
    found = find_spec(NAME)
    return {} if found is None or found.origin is None else {VARIABLE: str(Path(found.origin).parent)}


def use_package(folder: str) -> bool:
    """In the engine's process, before anything imports it. False: it cannot be loaded here, and vLLM, which needs one,
    has its own."""
    spec = spec_from_file_location(NAME, Path(folder) / "__init__.py", submodule_search_locations=[folder])
    if not folder or spec is None or spec.loader is None:
        return False
    package = sys.modules[NAME] = module_from_spec(spec)
    try:
        spec.loader.exec_module(package)
    except (ImportError, OSError):
        for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
            del sys.modules[name]
        return False
    return True


def withhold_package() -> None:
    """After vLLM has imported its own, and before the engine is made. Whoever imports it now gets an ImportError: this
    process serves no grammars."""
    sys.modules[NAME] = None  # type: ignore[assignment]
