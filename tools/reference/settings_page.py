"""settings.md: every setting, with its variable, its default and the docstring under it."""

import importlib
import importlib.util
import inspect
import json
import sys
from types import ModuleType

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from motet.described_model import field_docstrings
from motet.settings import RENAMED
from tools.reference.markdown import code, flat, note, table
from tools.reference.packages import PACKAGES


def module_of(package: str, name: str) -> ModuleType | None:
    if importlib.util.find_spec(f"{package}.{name}") is None:
        return None
    return importlib.import_module(f"{package}.{name}")


def settings_of(module: ModuleType) -> list[type[BaseSettings]]:
    return [
        kind
        for _, kind in sorted(vars(module).items())
        if inspect.isclass(kind) and issubclass(kind, BaseSettings) and kind.__module__ == module.__name__
    ]


def default_of(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, list | tuple | set | frozenset):
        value = json.dumps(list(value))
    return "" if value is None or value == "" else code(value)


def variable(kind: type[BaseSettings], name: str) -> str:
    alias = kind.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else f"{kind.model_config.get('env_prefix', '')}{name}".upper()


def settings_page() -> str:
    parts = [
        note("each package's settings.py"),
        "# Settings\n",
        flat("""Every process reads its settings from the environment, once, when it starts. Lists are written as JSON.
        If a value is wrong, the process ends with exit status 2 and names the variable. `motet up` sets what connects
        the processes; they inherit the rest from its environment.""")
        + "\n",
    ]
    for package, title in PACKAGES.items():
        module = module_of(package, "settings")
        kinds = settings_of(module) if module is not None else []
        if not kinds:
            continue
        parts.append(f"## {title}\n")
        for kind in kinds:
            docstrings = field_docstrings(kind)
            if len(kinds) > 1:
                parts.append(f"{inspect.cleandoc(kind.__doc__ or '')}\n")
            rows = []
            for name, field in kind.model_fields.items():
                if name not in docstrings:
                    sys.exit(f"{kind.__module__}.{kind.__name__}.{name} has no docstring under it: say what it changes")
                rows.append([code(variable(kind, name)), default_of(field), flat(docstrings[name])])
            parts.append(table(["variable", "default", "meaning"], rows))
    renamed = [[code(new), code(old)] for old, new in sorted(RENAMED.items(), key=lambda pair: pair[1])]
    parts += [
        "## Renamed\n",
        "If an old name is still set, the process ends with exit status 2 and says the new name.\n",
        table(["variable", "old name"], renamed),
    ]
    return "\n".join(parts)
