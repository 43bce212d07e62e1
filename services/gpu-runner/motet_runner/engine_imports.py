"""Imports of an engine's process, without what an engine never runs.

transformers also trains models, on many machines, and generates by itself. For that, it imports torch's compiler and
torch's tensors of many machines, and it reads the names in the files of all its models twice. An engine's process
starts sooner without these. Other processes that import transformers get all of it.
"""

import sys
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from motet_runner.kept_names import keeping

_COMPILER = "torch._dynamo"
_MASKS = "_trace_wrapped_higher_order_op"
"""The one module of the compiler that transformers imports a name from. It needs no other."""
_MARKS = ("allow_in_graph", "assume_constant_result", "disable")
"""Decorators that tell the compiler how to treat a function"""
_CHOICES = "transformers.utils.import_utils"
_NAMES = "create_import_structure_from_path"
_UNUSED = ("is_accelerate_available", "is_torch_distributed_available")


@contextmanager
def for_an_engine(kept_in: Path | None, *, beside_peft: bool = False) -> Iterator[None]:
    """Import transformers here. It stays as it was imported for as long as the process lives. `kept_in`: the folder of
    what the next start need not find again. `beside_peft`: True if PEFT may be imported, too: it asks for more"""
    _postpone_compiler()
    finder = _Finder(kept_in, () if beside_peft else _UNUSED)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


# ----------------------------------------------------------------------------------------------------- torch's compiler


_LOADING = RLock()


class _Postponed(ModuleType):
    """torch's compiler, which runs its code once something asks for more of it than marks on functions. Other threads
    that ask meanwhile wait until it has run."""

    def __getattr__(self, name: str) -> Any:
        self._load()
        return ModuleType.__getattribute__(self, name)  # `super` knows it no more: its class is another one

    @property
    def __path__(self) -> MutableSequence[str]:  # type: ignore[override] # for as long as this is its class
        """Python asks for it before it imports one of the package's modules. It then has that module's lock, so it must
        not wait: a thread that runs the package's code may need the module."""
        assert self.__spec__ is not None
        path = self.__spec__.submodule_search_locations
        assert path is not None
        if _LOADING.acquire(blocking=False):
            try:
                self._load()
            finally:
                _LOADING.release()
        return path

    def _load(self) -> None:
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        with _LOADING:
            if "__path__" in vars(self):
                return  # it has run, or its own code asks
            vars(self)["__path__"] = spec.submodule_search_locations
            spec.loader.exec_module(self)
            self.__class__ = ModuleType  # type: ignore[assignment] # the same object, which others have imported


def _postpone_compiler() -> None:
    import torch  # noqa: F401 - the compiler is in this package

    package = find_spec(_COMPILER)
    assert package is not None
    assert package.origin is not None
    file = Path(package.origin).with_name(f"{_MASKS}.py")
    if _COMPILER in sys.modules or not file.is_file():
        return
    masks = spec_from_file_location(f"{_COMPILER}.{_MASKS}", file)
    assert masks is not None
    assert masks.loader is not None
    compiler, needed = module_from_spec(package), module_from_spec(masks)
    del compiler.__path__
    vars(compiler).update(dict.fromkeys(_MARKS, _unmarked))
    compiler.__class__ = _Postponed
    sys.modules |= {package.name: compiler, masks.name: needed}
    masks.loader.exec_module(needed)


def _unmarked(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
    """A decorator, with or without arguments"""
    return function if function is not None else _unmarked


# ------------------------------------------------------------------------------------------------ transformers' choices


class _Finder:
    def __init__(self, kept_in: Path | None, absent: Sequence[str]) -> None:
        self._kept_in = kept_in
        self._absent = absent

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _CHOICES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin, self._change)
        return spec

    def _change(self, module: ModuleType) -> None:
        for name in self._absent:
            setattr(module, name, lambda *_, **__: False)
        if (find := getattr(module, _NAMES, None)) is not None:
            setattr(module, _NAMES, keeping(find, self._kept_in))


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, change: Callable[[ModuleType], None]) -> None:
        super().__init__(name, path)
        self._change = change

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self._change(module)
