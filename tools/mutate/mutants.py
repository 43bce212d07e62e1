"""The mutants of a module: its source with one thing changed that a test should notice. Pure.

A comparison has another operator, a condition is turned around, a constant is another one, two arguments change places,
or a statement is gone. What only people read is left alone: logs, messages, annotations. So is what changes nothing:
the order of what `min` and `max` compare, and `strict` of `zip`.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OTHER_OPERATOR: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
LOGGERS = frozenset({"log", "logger"})
ORDERLESS = frozenset({"min", "max"})


@dataclass(frozen=True, slots=True)
class Mutant:
    line: int
    """The first line of what is changed"""
    kind: str
    before: str
    after: str
    source: str
    """The whole module"""
    at_import: bool
    """It is in no function's body, so it runs before any test"""


def mutants_of(source: str) -> list[Mutant]:
    """In the order of the source."""
    encoded = source.encode()
    starts = [0]
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, kind, after, at_import in _changes(ast.parse(source)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        changed = (encoded[:begin] + after.encode() + encoded[end:]).decode()
        found.append(Mutant(node.lineno, kind, encoded[begin:end].decode(), after, changed, at_import))
    return sorted(found, key=lambda mutant: (mutant.line, mutant.kind, mutant.before))


Change = tuple[ast.expr | ast.stmt, str, str]


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, str, bool]]:
    waiting: list[tuple[ast.AST, bool]] = [(tree, True)]
    while waiting:
        node, at_import = waiting.pop()
        for change in MAKERS:
            for changed, kind, after in change(node):
                yield changed, kind, after, at_import
        waiting += [
            (child, at_import and not _is_body(child, node))
            for child in ast.iter_child_nodes(node)
            if not _only_people_read(child, node) and not _changes_nothing(child, node)
        ]


def _is_body(child: ast.AST, parent: ast.AST) -> bool:
    """The head of a function, with its defaults, is not."""
    return isinstance(parent, FUNCTIONS) and not isinstance(child, ast.arguments)


def _only_people_read(child: ast.AST, parent: ast.AST) -> bool:
    if isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert) or (isinstance(child, ast.Call) and _is_log(child)):
        return True
    if isinstance(parent, ast.AnnAssign | ast.arg) and child is parent.annotation:
        return True
    if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
        return child is parent.returns or child in parent.decorator_list
    return isinstance(parent, ast.ClassDef) and child in [*parent.decorator_list, *parent.bases]


def _changes_nothing(child: ast.AST, parent: ast.AST) -> bool:
    """`strict` only says that two lengths are equal."""
    return isinstance(child, ast.keyword) and child.arg == "strict" and _calls(parent, frozenset({"zip"}))


def _calls(node: ast.AST, names: frozenset[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _is_log(call: ast.Call) -> bool:
    of = call.func
    return isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name) and of.value.id in LOGGERS


def _comparison(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = ast.Compare(node.left, [OTHER_OPERATOR[type(node.ops[0])]], node.comparators)
        yield node, "comparison", f"({ast.unparse(other)})"


def _condition(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.Constant):
        yield node.test, "condition", f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.BoolOp):
        other = ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        yield node, "condition", f"({ast.unparse(other)})"


def _constant(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, "constant", str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, "constant", repr(node.value + 1)


def _arguments(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(one, ast.Starred) for one in node.args):
        first, second, *rest = node.args
        orderless = _calls(node, ORDERLESS) and not node.keywords
        if not orderless and ast.dump(first) != ast.dump(second):
            yield node, "argument order", ast.unparse(ast.Call(node.func, [second, first, *rest], node.keywords))


def _statement(node: ast.AST) -> Iterator[Change]:
    """Only what has an effect elsewhere: a local name that is gone is an error that every test finds."""
    dropped = (
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _is_log(node.value))
        or (
            isinstance(node, ast.Assign)
            and not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
        )
        or isinstance(node, ast.AugAssign | ast.Delete)
    )
    if dropped:
        assert isinstance(node, ast.stmt)
        yield node, "statement", "pass"


MAKERS: tuple[Callable[[ast.AST], Iterator[Change]], ...] = (_comparison, _condition, _constant, _arguments, _statement)
