"""What the condition of a wait saw when the wait ended in vain: a stranger may get only one line of a summary."""

import ast
import inspect
import linecache
import types
from collections.abc import Callable, Iterator

MAX_SEEN = 300
"""Characters"""


def last_seen(condition: Callable[[], object]) -> str:
    """The text of a condition that was not met, and the values of what it compares: `count() == 1, with count() = 2`.
    Those of calls are asked for again. Only for a failure: it reads the file. It raises nothing."""
    try:
        return shortened(_described(condition))
    except Exception as error:
        return shortened(f"{getattr(condition, '__qualname__', condition)} ({type(error).__name__}: {error})")


def shortened(text: str, most: int = MAX_SEEN) -> str:
    """In one line"""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _described(condition: Callable[[], object]) -> str:
    found = _expression_of(condition)
    if found is None:
        return f"{getattr(condition, '__qualname__', condition)}"
    assert isinstance(condition, types.FunctionType)
    names = {**condition.__globals__, **inspect.getclosurevars(condition).nonlocals, **(_defaults(condition))}
    seen = {ast.unparse(one): _value(one, names) for one in _compared(found)}
    whole = ast.unparse(found)
    values = ", ".join(f"{text} = {value}" for text, value in seen.items() if text != value)
    return f"{whole}, with {values}" if values else whole


def _defaults(condition: types.FunctionType) -> dict[str, object]:
    return {name: one.default for name, one in inspect.signature(condition).parameters.items()}


def _expression_of(condition: Callable[[], object]) -> ast.expr | None:
    """Of a lambda. Of several in one line, the one with the same instructions' places."""
    code = getattr(condition, "__code__", None)
    if code is None or code.co_name != "<lambda>":
        return None
    tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    places = set(code.co_positions())
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            body = node.body
            if (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset) in places:
                return body
    return None


def _compared(expression: ast.expr) -> Iterator[ast.expr]:
    """The parts that decide: what is compared, searched or negated, through every `and` and `or`."""
    match expression:
        case ast.BoolOp(values=values):
            for value in values:
                yield from _compared(value)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield from _compared(operand)
        case ast.Compare(left=left, comparators=comparators):
            yield from (one for one in (left, *comparators) if not isinstance(one, ast.Constant))
        case _:
            yield expression


def _value(expression: ast.expr, names: dict[str, object]) -> str:
    try:
        return repr(eval(compile(ast.Expression(expression), "<condition>", "eval"), dict(names)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
