"""Imports of the modules that a process is started with: what takes time and serves nothing is left out.

Collections of garbage took a fifth of the time that a service needs for its imports, and find nothing: what is imported
stays. structlog imports rich if it can, for tracebacks in colour. Logs of our processes have plain ones, and rich takes
half of the time of that import.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def without_collections(name: str = "__main__") -> Iterator[None]:
    """Import without collections. Imported objects are then frozen: later collections skip them.

    It changes nothing if collections are off already, as when a test imports the module of a process. `name`: that of
    a module which other processes import, too. There it changes nothing: what lives there would never be freed.
    """
    if name != "__main__" or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        _import_structlog()
        yield
    finally:
        gc.freeze()
        gc.enable()


def _import_structlog() -> None:
    if "rich" in sys.modules or "structlog" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment] # so an import raises ImportError
    try:
        import_module("structlog")
    finally:
        del sys.modules["rich"]
