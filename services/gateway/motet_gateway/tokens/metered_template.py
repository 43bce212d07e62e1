"""Chat templates whose work is counted (`template_meter`), so that they may run on the event loop.

The syntax tree of a template is changed before it is compiled: what can make or read much is done by a filter of the
meter, and loops and macros pay for their bodies. jinja2 computes nothing at compile time. Still, compiling takes long
for a long template, and Python can't interrupt it: it happens in a render process, which returns the code.
"""

import marshal
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, cast

import jinja2
import orjson
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from motet_gateway.tokens.chat_template import ChatTemplate
from motet_gateway.tokens.template_meter import (
    ADD_ALL,
    COMPARE,
    COPIED_CHARACTERS,
    JOIN_ALL,
    LOOK_UP,
    MAX_NUMBER,
    PAY,
    SLICE,
    WRITE,
    MeteredEnvironment,
    NotMeterable,
)

MAX_TEMPLATE_CHARACTERS = 64 * 1024
"""Templates of models have up to some 20,000."""
MAX_CODE_BYTES = 2 << 20
"""The gateway loads the code on its event loop. A template of 20,000 characters has some 100 KB of it."""

_NODES = frozenset(
    {
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Scope, nodes.ExprStmt),
        *(nodes.If, nodes.For, nodes.Break, nodes.Continue, nodes.Macro),
        *(nodes.Assign, nodes.Name, nodes.NSRef, nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair),
        *(nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.CondExpr, nodes.Test),
        *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Mod, nodes.Div, nodes.FloorDiv, nodes.Neg, nodes.Pos, nodes.Concat),
        *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Filter, nodes.Call, nodes.Keyword),
    }
)
_UNITS: dict[type[nodes.Node], int] = {nodes.Getattr: 8, nodes.Getitem: 8, nodes.Call: 16, nodes.Filter: 2}
"""Of nodes for which jinja2's sandbox takes longer."""


def metered_code(text: str) -> bytes:
    """The code of a template. Raises ValueError if the text isn't a valid template, or its work can't be counted."""
    if len(text) > MAX_TEMPLATE_CHARACTERS:
        raise ValueError(f"it is longer than {MAX_TEMPLATE_CHARACTERS} characters")
    environment = MeteredEnvironment()
    try:
        tree = _Metering(environment).over(environment.parse(text))
        code = marshal.dumps(environment.compile(tree))
    except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
        raise ValueError(f"the chat template cannot be parsed: {error}") from error
    except NotMeterable as reason:
        raise ValueError(reason.why) from None
    if len(code) > MAX_CODE_BYTES:
        raise ValueError(f"its code is larger than {MAX_CODE_BYTES} bytes")
    return code


class MeteredTemplate:
    def __init__(self, code: bytes, special_tokens: Mapping[str, str]) -> None:
        """`code` is from `metered_code`, made by a process that has run no template."""
        self._environment = MeteredEnvironment()
        template = jinja2.Template.from_code(
            self._environment,
            marshal.loads(code),  # noqa: S302 - only Motet's own code has written it
            self._environment.make_globals(None),
        )
        self._template = ChatTemplate(template, special_tokens)

    def render(self, context: bytes) -> str:
        """Raises NotMeterable, or CannotRender as `ChatTemplate` does."""
        self._environment.begin()
        return self._template.render(**orjson.loads(context))


class _Metering(NodeTransformer):
    """Changes a syntax tree so that its work is counted. Raises NotMeterable for what can't be counted."""

    def __init__(self, environment: MeteredEnvironment) -> None:
        self._environment = environment

    def over(self, tree: nodes.Template) -> nodes.Template:
        self.visit(tree)
        tree.body.insert(0, _payment(tree.body))
        return tree.set_environment(self._environment)  # type: ignore[return-value]

    def visit(self, node: nodes.Node, *arguments: Any, **options: Any) -> Any:
        if type(node) not in _NODES:
            raise NotMeterable(f"it uses {type(node).__name__}")
        return super().visit(node, *arguments, **options)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        if node.recursive:
            raise NotMeterable("it uses a recursive loop")
        self.generic_visit(node)
        node.body.insert(0, _payment(node.body))
        if node.test is not None:
            node.test = nodes.And(_paid([node.test]), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        self.generic_visit(node)
        node.body.insert(0, _payment([*node.body, *node.defaults]))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        self.generic_visit(node)
        node.nodes = [one if isinstance(one, nodes.TemplateData) else _filter(one, WRITE) for one in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), JOIN_ALL)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        self.generic_visit(node)
        left = node.left
        if isinstance(left, nodes.Filter) and left.name == ADD_ALL:
            cast("nodes.List", left.node).items.append(node.right)
            return left
        return _filter(nodes.List([left, node.right]), ADD_ALL)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Const):
            return node
        if not isinstance(node.arg, nodes.Slice):
            return _filter(node.node, LOOK_UP, node.arg)
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, SLICE, *(bound or nodes.Const(None) for bound in bounds))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if all(_is_quick(*pair, operand.op) for pair, operand in zip(pairwise(sides), node.ops, strict=True)):
            return node
        if len(node.ops) > 1:
            raise NotMeterable("it compares several values at once")
        return _filter(sides[0], COMPARE, sides[1], nodes.Const(node.ops[0].op))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        if not all(isinstance(pair.key, nodes.Const) for pair in node.items):
            raise NotMeterable("it makes a mapping with computed keys")
        return self.generic_visit(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        if node.name not in self._environment.filters or node.node is None or node.dyn_args or node.dyn_kwargs:
            raise NotMeterable(f"it uses the filter {node.name}")
        return self.generic_visit(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        if node.name not in self._environment.tests or node.dyn_args or node.dyn_kwargs:
            raise NotMeterable(f"it uses the test {node.name}")
        return self.generic_visit(node)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        if node.dyn_args or node.dyn_kwargs:
            raise NotMeterable("it calls with a list of arguments")
        return self.generic_visit(node)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        if isinstance(node.value, int) and abs(node.value) > MAX_NUMBER:
            raise NotMeterable("it names a large number")
        return node


def _is_quick(left: nodes.Expr, right: nodes.Expr, how: str) -> bool:
    """Whether the comparison reads no more than what the template itself names."""
    if how in ("in", "notin"):
        return isinstance(right, nodes.List | nodes.Tuple) and all(isinstance(one, nodes.Const) for one in right.items)
    return isinstance(left, nodes.Const) or isinstance(right, nodes.Const)


def _payment(body: Iterable[nodes.Node]) -> nodes.Node:
    return nodes.ExprStmt(_paid(body))


def _paid(body: Iterable[nodes.Node]) -> nodes.Expr:
    """Pays for each node, also in parts that are not executed, and for the template's own text."""
    units = 1
    unseen = list(body)
    while unseen:
        node = unseen.pop()
        unseen += node.iter_child_nodes()
        units += _UNITS.get(type(node), 1)
        words = getattr(node, "data" if isinstance(node, nodes.TemplateData) else "value", None)
        units += len(words) // COPIED_CHARACTERS if isinstance(words, str) else 0
    return _filter(nodes.Const(units), PAY)


def _filter(value: nodes.Expr, name: str, *arguments: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(value, name, list(arguments), [], None, None)
