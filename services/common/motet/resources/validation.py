"""Reads and checks manifests without a cluster. Every error says where it is, which field is wrong, and what to do.

A file is YAML 1.1, as for kubectl, and may have several documents. Nothing is executed or fetched here.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from motet.resources.adapter import LoRAAdapter
from motet.resources.core_kinds import Namespace, Secret
from motet.resources.fields import API_VERSION, GROUP, PATTERN_SENTENCES
from motet.resources.planned_fields import PLANNED_FIELDS, PLANNED_VALUES
from motet.resources.pool import ServingPool

Resource = LoRAAdapter | ServingPool | Namespace | Secret

MAX_MANIFEST_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 64
MAX_SHOWN = 60
"""Characters of a value, or of a name, that a problem shows."""
_TOO_DEEP = f"is nested too deeply: more than {MAX_DEPTH} levels"
SUFFIXES = (".yaml", ".yml", ".json")

_KINDS: dict[str, tuple[str, type[Resource]]] = {
    "LoRAAdapter": (API_VERSION, LoRAAdapter),
    "ServingPool": (API_VERSION, ServingPool),
    "Namespace": ("v1", Namespace),
    "Secret": ("v1", Secret),
}

_SERVER_FIELDS = frozenset(
    (
        "creationTimestamp",
        "deletionGracePeriodSeconds",
        "deletionTimestamp",
        "finalizers",
        "generation",
        "managedFields",
        "ownerReferences",
        "resourceVersion",
        "selfLink",
        "uid",
    )
)
"""Fields that `kubectl get -o yaml` adds to metadata. They are ignored, so that you can apply its output again."""

FieldPath = tuple[str | int, ...]
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):  # type: ignore[misc]
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """YAML takes 2026-02-30 for a date, and 0x_ for a number: PyYAML then raises whatever Python does."""
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int):
                str(value)  # raises for a number of thousands of digits, as Python does when it reads a decimal one
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:
            kind = node.tag.rpartition(":")[2]
            problem = f"this is no {kind}; write it in quotes if it is text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None
        else:
            return value

    def construct_unknown(self, node: yaml.Node) -> NoReturn:
        """PyYAML would show the tag, which may be a password that begins with an exclamation mark."""
        problem = "this tag is not known; write text that begins with '!' in quotes"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


_Loader.add_constructor(None, _Loader.construct_unknown)


@dataclass(frozen=True, slots=True)
class ManifestPosition:
    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One error that a person has to correct."""

    place: ManifestPosition
    message: str
    field: str = ""
    subject: str = ""
    """Kind and name of the object, if they can be read."""

    def __str__(self) -> str:
        """Always UTF-8, which the name of a file need not be."""
        text = ": ".join(part for part in (str(self.place), self.subject, self.field, self.message) if part)
        return text.encode(errors="backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class Manifest:
    """A valid object, and its position in a file."""

    resource: Resource
    place: ManifestPosition
    node: yaml.Node | None = None
    """None: its text is not at hand."""

    @property
    def key(self) -> tuple[str, str]:
        return (self.resource.kind, str(self.resource.object_name))

    def place_of(self, path: FieldPath) -> ManifestPosition:
        return _place(self.place.file, _find(self.node, path)[0]) if self.node is not None else self.place


@dataclass(frozen=True, slots=True)
class ManifestSet:
    manifests: tuple[Manifest, ...]
    problems: tuple[Problem, ...]


def files_of(path: Path) -> list[Path]:
    """The files for `-f PATH`: a file itself, or the manifests directly in a folder, as with kubectl."""
    if path.is_file():
        return [path]
    return sorted(entry for entry in path.iterdir() if names_manifest(entry.name) and entry.is_file())


def names_manifest(name: str) -> bool:
    """Whether a file with this name in a folder is one of its manifests."""
    return name.endswith(SUFFIXES) and not name.startswith(".")


def read_file(path: Path) -> ManifestSet:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return _refused(str(path), "has a name that is not UTF-8; rename it")
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            limit = MAX_MANIFEST_BYTES // 1024**2
            return _refused(str(path), f"is larger than {limit} MiB; split it into several files")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return _refused(str(path), f"is not UTF-8 text: byte {error.start} cannot be read")
    except OSError as error:
        return _refused(str(path), f"cannot be read: {error.strerror}")
    return read_text(text, file=str(path))


def _refused(file: str, message: str) -> ManifestSet:
    return ManifestSet((), (Problem(ManifestPosition(file, 1, 1), message),))


def read_text(text: str, *, file: str = "<text>") -> ManifestSet:
    """All valid objects of a YAML text, and all problems of the others."""
    manifests: list[Manifest] = []
    problems: list[Problem] = []
    try:
        if (deep := _too_deep(file, text)) is not None:
            return ManifestSet((), (deep,))
        loader = _Loader(text)
    except yaml.YAMLError as error:
        return ManifestSet((), (_yaml_problem(file, error, text),))
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"):
                continue
            found = _repeated_keys(file, node) or _read_document(file, node, loader.construct_document(node))
            if isinstance(found, Manifest):
                manifests.append(found)
            else:
                problems.extend(found)
    except yaml.YAMLError as error:
        problems.append(_yaml_problem(file, error, text))
    except RecursionError:
        problems.append(Problem(ManifestPosition(file, 1, 1), _TOO_DEEP))
    finally:
        loader.dispose()
    return ManifestSet(tuple(manifests), tuple(problems))


def read_all(paths: Iterable[Path]) -> ManifestSet:
    """Everything in several files. If an object is declared twice, the problem names both positions."""
    manifests: dict[tuple[str, str], Manifest] = {}
    problems: list[Problem] = []
    for path in paths:
        reading = read_file(path)
        problems += reading.problems
        for manifest in reading.manifests:
            first = manifests.setdefault(manifest.key, manifest)
            if first is not manifest:
                kind, name = manifest.key
                problems.append(
                    Problem(
                        manifest.place, f"is declared twice: first at {first.place}; remove one", "", f"{kind} {name}"
                    )
                )
    return ManifestSet(tuple(manifests.values()), tuple(problems))


# ------------------------------------------------------------------------------------------------------ one document


def _read_document(file: str, node: yaml.Node, data: Any) -> Manifest | list[Problem]:
    here = _place(file, node)
    if not isinstance(data, dict):
        return [Problem(here, f"must be an object with apiVersion, kind and metadata, not {_a(data)}")]
    kind, version = data.get("kind"), data.get("apiVersion")
    problem = _check_kind(file, node, kind, version)
    if problem is not None:
        return [problem]
    assert isinstance(kind, str)
    subject = _subject(kind, data)
    content = {key: value for key, value in data.items() if key != "status"}
    if isinstance(content.get("metadata"), dict):
        content["metadata"] = {key: value for key, value in content["metadata"].items() if key not in _SERVER_FIELDS}
    model = _KINDS[kind][1]
    try:
        resource = model.model_validate(content, by_alias=True, by_name=False)
    except ValidationError as error:
        return [
            _explain(file, node, subject=subject, kind=kind, model=model, detail=detail)
            for detail in error.errors(include_url=False)
        ]
    return Manifest(resource, here, node)


def _check_kind(file: str, node: yaml.Node, kind: Any, version: Any) -> Problem | None:
    if not isinstance(kind, str) or not kind:
        return Problem(_place(file, _find(node, ("kind",))[0]), "must be set to one of " + ", ".join(_KINDS), "kind")
    if kind not in _KINDS:
        return Problem(
            _place(file, _find(node, ("kind",))[0]),
            f"must be {_one_of(list(_KINDS))}, not {_short(kind)}{_did_you_mean(kind, _KINDS)}",
            "kind",
        )
    wanted = _KINDS[kind][0]
    if version != wanted:
        where = _place(file, _find(node, ("apiVersion",))[0])
        if isinstance(version, str) and version.startswith(f"{GROUP}/"):
            return Problem(
                where, f"must be {wanted}: this version of Motet does not read {_short(version)}", "apiVersion"
            )
        return Problem(where, f"must be {wanted} for a {kind}", "apiVersion")
    return None


def _subject(kind: str, data: dict[str, Any]) -> str:
    metadata = data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        return kind
    if kind == "Namespace":
        return f"{kind} {_short(name)}"
    assert isinstance(metadata, dict)
    return f"{kind} {_short(str(metadata.get('namespace') or 'default'))}/{_short(name)}"


def _explain(
    file: str, root: yaml.Node, *, subject: str, kind: str, model: type[BaseModel], detail: ErrorDetails
) -> Problem:
    context: dict[str, Any] = detail.get("ctx") or {}
    path: FieldPath = tuple(part for part in detail["loc"] if part != "[key]")
    if detail["type"] == "rule" and context["field"]:
        path = (*path, context["field"])
    node, exact = _find(root, path, key=detail["type"] == "extra_forbidden")
    if detail["type"] == "missing":
        message = "is required"
    elif detail["type"] == "extra_forbidden":
        message = _unknown_field(kind, model, path)
    else:
        message = _sentence(kind, path, detail, context, node if exact else None)
    return Problem(_place(file, node), message, _dotted(path), subject)


def _unknown_field(kind: str, model: type[BaseModel], path: FieldPath) -> str:
    dotted = _dotted(path)
    coming = PLANNED_FIELDS.get(kind, {})
    if dotted in coming:
        return f"not yet: {coming[dotted]} come later; remove this field for now"
    known = fields_at(model, path[:-1])
    parent = _dotted(path[:-1])
    names = [*known, *(name.rpartition(".")[2] for name in coming if name.rpartition(".")[0] == parent)]
    nearest = _did_you_mean(str(path[-1]), names)
    return "is not a known field" + (nearest or (f"; known fields: {', '.join(known)}" if known else ""))


def _sentence(kind: str, path: FieldPath, detail: ErrorDetails, context: dict[str, Any], node: yaml.Node | None) -> str:
    value = detail["input"]
    hidden = kind == "Secret"  # whatever stands in it, and wherever
    shown = _a(value) if hidden else _shown(value, node)
    match detail["type"]:
        case "rule":
            return str(context["sentence"])
        case "literal_error":
            dotted = _dotted(path)
            coming = PLANNED_VALUES.get(kind, {}).get(dotted, {})
            if isinstance(value, str) and value in coming:
                return f"not yet: {value} ({coming[value]}) comes later"
            options = [text.strip("'") for text in context["expected"].replace(" or ", ", ").split(", ")]
            return f"must be {_one_of(options)}, not {shown}{_did_you_mean(_text(value, node), options)}"
        case "string_type":
            return f"must be text, not {shown}{_quote_hint(value, node, hidden=hidden)}"
        case "int_type" | "int_from_float" | "int_parsing":
            return f"must be a whole number, not {shown}"
        case "bool_type" | "bool_parsing":
            return f"must be true or false, not {shown}"
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"must be a mapping, not {_a(value)}"
        case "list_type":
            return f"must be a list, not {_a(value)}"
        case "greater_than_equal":
            return f"must be at least {context['ge']}, not {shown}"
        case "less_than_equal":
            return f"must be at most {context['le']}, not {shown}"
        case "string_too_long":
            return f"must be {context['max_length']} characters or fewer, not {len(value)}"
        case "too_long":
            return f"must have at most {context['max_length']} entries, not {context['actual_length']}"
        case "string_pattern_mismatch":
            sentence = PATTERN_SENTENCES[context["pattern"]]
            # Before an '@' may stand a password.
            return sentence if hidden or "@" in value else f"{sentence}; not {shown}"
        case _:
            return detail["msg"]


def _one_of(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else "one of " + ", ".join(options)


def _a(value: Any) -> str:
    if value is None:
        return "empty"
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")


def _shown(value: Any, node: yaml.Node | None) -> str:
    if isinstance(value, (dict, list)) or value is None:
        return _a(value)
    text = _short(_text(value, node))
    return f"'{text}'" if isinstance(value, str) else text


def _text(value: Any, node: yaml.Node | None) -> str:
    """As it is written, not as YAML reads it."""
    return node.value if isinstance(node, yaml.ScalarNode) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _quote_hint(value: Any, node: yaml.Node | None, *, hidden: bool) -> str:
    """A hint for values without quotes. YAML 1.1 does not read `no`, `on` or `1.10` as text."""
    if isinstance(node, yaml.ScalarNode) and not isinstance(value, (dict, list)) and value is not None:
        what = "it" if hidden or len(node.value) > MAX_SHOWN else f'"{node.value}"'
        return f"; write {what} in quotes"
    return ""


def _did_you_mean(word: str, names: Iterable[str]) -> str:
    by_fold = {name.lower(): name for name in names}
    close = difflib.get_close_matches(word.lower(), by_fold, n=1, cutoff=0.6)
    return f"; did you mean {by_fold[close[0]]}?" if close else ""


def fields_at(model: type[BaseModel], path: FieldPath) -> list[str]:
    """The names of the fields that the mapping at `path` may have, as written in YAML."""
    current: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int):
            continue
        assert current is not None
        field = next((f for n, f in current.model_fields.items() if (f.alias or n) == part), None)
        current = _model_in(field.annotation) if field is not None else None
        if current is None:
            return []
    assert current is not None
    return [field.alias or name for name, field in current.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for argument in get_args(annotation) if (found := _model_in(argument))), None)


def _dotted(path: FieldPath) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{_short(part)}" if text else _short(part))
    return text


# ------------------------------------------------------------------------------------------------------------ places


def _place(file: str, node: yaml.Node) -> ManifestPosition:
    return ManifestPosition(file, node.start_mark.line + 1, node.start_mark.column + 1)


def _find(node: yaml.Node, path: FieldPath, *, key: bool = False) -> tuple[yaml.Node, bool]:
    """The node to report for `path`, and whether that is the value at `path`.

    For a mapping or list, and with `key`, it is the node of the key; for an absent field, the deepest parent that
    exists. Visits only the nodes on the path, because a document with aliases inside aliases may be an exponentially
    large tree.
    """
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == part), None)
            if pair is None:
                return node, False
            if last and (key or not isinstance(pair[1], yaml.ScalarNode)):
                return pair[0], False
            node = pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
        else:
            return node, False
    return node, True


def _repeated_keys(file: str, root: yaml.Node) -> list[Problem]:
    """Find keys that occur twice in one mapping. YAML would silently use the last one; the API server refuses them."""
    problems: list[Problem] = []
    seen: set[int] = set()
    waiting = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if depth > MAX_DEPTH:
            return [Problem(_place(file, node), _TOO_DEEP)]
        if isinstance(node, yaml.SequenceNode):
            waiting += [(child, depth + 1) for child in node.value]
        elif isinstance(node, yaml.MappingNode):
            first: dict[str, yaml.Node] = {}
            for key, value in node.value:
                waiting.append((value, depth + 1))
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    before = first.setdefault(key.value, key)
                    if before is not key:
                        problems.append(
                            Problem(
                                _place(file, key),
                                f"is set twice; first in line {before.start_mark.line + 1}",
                                _short(key.value),
                            )
                        )
    return problems


def _too_deep(file: str, text: str) -> Problem | None:
    """A problem if the text is nested too deeply. This reads only events, because libyaml's composer is recursive and
    would crash the process with a stack overflow."""
    loader = _Loader(text)
    depth = 0
    try:
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    assert event.start_mark is not None
                    return Problem(
                        ManifestPosition(file, event.start_mark.line + 1, event.start_mark.column + 1), _TOO_DEEP
                    )
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
    except yaml.YAMLError as error:
        # libyaml 0.2.6 and later stop at a depth of their own, which they may reach while they look ahead of the event
        # that is deeper than ours. `read_text` reports every other error, after the documents before it.
        mark = getattr(error, "problem_mark", None)
        if mark is not None and "nesting depth" in (getattr(error, "problem", None) or ""):
            return Problem(ManifestPosition(file, mark.line + 1, mark.column + 1), _TOO_DEEP)
    finally:
        loader.dispose()
    return None


def _yaml_problem(file: str, error: yaml.YAMLError, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = ManifestPosition(file, mark.line + 1, mark.column + 1) if mark is not None else ManifestPosition(file, 1, 1)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    line = next(iter(text.splitlines()[place.line - 1 : place.line]), "")
    hint = "; YAML is indented with spaces, not tabs" if "\t" in line[: place.column] else ""
    return Problem(place, f"is not YAML: {what}{hint}")
