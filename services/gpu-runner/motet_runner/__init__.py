"""The runner: it serves one base model and many adapters.

`from motet_runner import Engine` imports torch. Importing the package, its `plan` or its `interface` does not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from motet_runner.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from motet_runner.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
