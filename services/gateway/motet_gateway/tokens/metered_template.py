"""Chat templates whose work is counted, so that they may run on the event loop.

A template is a program that comes with a model. Most use only loops over the messages, conditions, and text. Time and
memory of such a template are bounded here, because

- each iteration of a loop and each call of a macro uses up a budget, by the size of its body;
- no stored value may grow beyond twice the size of the client's messages, so that one statement's result is bounded by
  the statement's length and can't grow from one to the next;
- filters, methods and functions are those whose result is never much larger than what they are given.

A template that uses anything else, or more than the budget, raises NotMeterable. It must run in a process that the
kernel can end.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import jinja2
import orjson
from jinja2 import nodes
from jinja2.runtime import Context, Macro
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from motet_gateway.tokens.chat_template import CannotRender, ChatEnvironment, ChatTemplate

MAX_TEMPLATE_CHARACTERS = 64 * 1024
"""Characters. Templates of models have up to some 20,000."""
BUDGET = 25_000
"""Units of work per rendering; one unit is one node of the template. Ten messages with a template of today's large
models take up to half of it."""
BYTES_OF_A_UNIT = 512
"""An operation on a whole value, such as a comparison, costs one more unit per so many bytes of the messages. The
template's own text costs one unit per so many characters."""
GROWTH = 2
SPARE_BYTES = 1024
"""A stored value may have `GROWTH` times the size of the messages, plus this for the template's own text."""
MAX_INDENT = 8
MAX_SEPARATOR_LENGTH = 64
MAX_NUMBER = 1 << 63

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
_LOOK_AT_ALL = (nodes.Assign, nodes.Compare, nodes.Add, nodes.Concat, nodes.Slice, nodes.Filter, nodes.Test, nodes.Call)
"""Operations whose work grows with the size of their operands."""
_FILTERS = frozenset(
    {
        *("trim", "length", "count", "first", "last", "list", "items", "join", "string", "safe", "tojson"),
        *("default", "d", "upper", "lower", "title", "capitalize"),
    }
)
_METHODS = frozenset(
    {
        *("strip", "lstrip", "rstrip", "split", "rsplit", "partition", "rpartition", "splitlines"),
        *("startswith", "endswith", "find", "rfind", "removeprefix", "removesuffix"),
        *("upper", "lower", "title", "capitalize", "isdigit", "isspace"),
        *("items", "keys", "values", "get"),
    }
)
# Names that no template can contain.
_PAY, _KEEP, _KEEP_IN_A_NAME = "motet: pay", "motet: keep", "motet: keep in a name"


class NotMeterable(CannotRender):
    """The template uses something that is not counted, or has used up its budget."""


class MeteredTemplate:
    """Raises ValueError if the text isn't a valid template, or its work can't be counted."""

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        if len(text) > MAX_TEMPLATE_CHARACTERS:
            raise ValueError(f"it is longer than {MAX_TEMPLATE_CHARACTERS} characters")
        self._meter = _Meter()
        try:
            self._template = ChatTemplate(text, special_tokens, self._meter)
        except NotMeterable as reason:
            raise ValueError(reason.message) from None

    def render(self, context: bytes) -> str:
        """Raises NotMeterable, or CannotRender as `ChatTemplate` does."""
        self._meter.begin(len(context))
        return self._template.render(**orjson.loads(context))


class _Meter(ChatEnvironment):
    """Counts the work of one rendering at a time."""

    intercepted_binops = frozenset({"*", "%", "**"})

    def __init__(self) -> None:
        super().__init__()
        self._left = 0
        self._units_of_all = 0
        self._most_kept = 0
        self._functions: Final = (self.globals["raise_exception"], self.globals["strftime_now"], Namespace)
        self.filters[_PAY] = self._pay
        self.filters[_KEEP] = self._keep
        self.filters[_KEEP_IN_A_NAME] = self._keep_in_a_name

    def begin(self, size: int) -> None:
        self._left = BUDGET
        self._units_of_all = 1 + size // BYTES_OF_A_UNIT
        self._most_kept = GROWTH * size + SPARE_BYTES

    def from_string(self, source: str | nodes.Template, *arguments: Any, **options: Any) -> jinja2.Template:
        tree = self.parse(source) if isinstance(source, str) else source
        return super().from_string(_Metering().over(tree), *arguments, **options)

    @pass_context
    def _pay(self, _: Context, price: tuple[int, int]) -> bool:
        nodes_alone, look_at_all = price
        self._left -= nodes_alone + look_at_all * self._units_of_all
        if self._left < 0:
            raise NotMeterable("it takes too many steps")
        return True

    @pass_context
    def _keep(self, _: Context, value: Any) -> Any:
        self._check_size((value,))
        return value

    @pass_context
    def _keep_in_a_name(self, _: Context, value: Any) -> Any:
        """A variable may hold a namespace, whose values are checked when they are set. Lists and namespaces may not
        hold one, since nested namespaces could grow without a check."""
        if not isinstance(value, Namespace):
            self._check_size((value,))
        return value

    def _check_size(self, values: Iterable[Any]) -> None:
        """Check the size that the values would have as text, also if they share parts."""
        left = self._most_kept
        unseen = list(values)
        while unseen:
            value = unseen.pop()
            left -= 1
            if isinstance(value, str):
                left -= len(value)
            elif isinstance(value, list | tuple):
                left -= len(value)
                unseen += value if left >= 0 else ()
            elif isinstance(value, dict):
                left -= len(value)
                unseen += (*value, *value.values()) if left >= 0 else ()
            elif isinstance(value, int):
                if abs(value) > MAX_NUMBER:
                    raise NotMeterable("it keeps a large number")
            elif not (value is None or isinstance(value, float | jinja2.Undefined)):
                raise NotMeterable(f"it keeps a {type(value).__name__}")
            if left < 0:
                raise NotMeterable("it keeps a value that grows")

    def call(self, context: Context, called: Any, /, *arguments: Any, **options: Any) -> Any:
        owner = getattr(called, "__self__", None)
        if not (
            isinstance(called, Macro)
            or called in self._functions
            or (type(owner) in (str, dict) and called.__name__ in _METHODS)
        ):
            raise NotMeterable("it calls what is not counted")
        self._check_size((*arguments, *options.values()))
        return super().call(context, called, *arguments, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        # With text they would repeat it or pad it to any width.
        if operator == "**" or not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise NotMeterable(f"it uses {operator} for more than numbers")
        return super().call_binop(context, operator, left, right)


class _Metering(NodeTransformer):
    """Adds the counting to a template's syntax tree. Raises NotMeterable for nodes that can't be counted."""

    def over(self, tree: nodes.Template) -> nodes.Template:
        self.visit(tree)
        tree.body.insert(0, self._payment(tree.body))
        return tree.set_environment(tree.environment)  # type: ignore[return-value,arg-type]

    def visit(self, node: nodes.Node, *arguments: Any, **options: Any) -> Any:
        if type(node) not in _NODES:
            raise NotMeterable(f"it uses {type(node).__name__}")
        return super().visit(node, *arguments, **options)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        if node.recursive:
            raise NotMeterable("it uses a recursive loop")
        self.generic_visit(node)
        node.body.insert(0, self._payment(node.body))
        if node.test is not None:
            node.test = nodes.And(self._paid([node.test]), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        self.generic_visit(node)
        node.body.insert(0, self._payment([*node.body, *node.defaults]))
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        self.generic_visit(node)
        keep = _KEEP_IN_A_NAME if isinstance(node.target, nodes.Name) else _KEEP
        node.node = _filter(cast("nodes.Expr", node.node), keep)
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        if node.name not in _FILTERS or node.node is None or node.dyn_args or node.dyn_kwargs:
            raise NotMeterable(f"it uses the filter {node.name}")
        if node.name == "join" and not all(_is_short(one) for one in (*node.args, *(kw.value for kw in node.kwargs))):
            raise NotMeterable("it joins with what is not a short text")
        if node.name == "tojson" and (node.args or not all(_is_plain(one) for one in node.kwargs)):
            raise NotMeterable("it calls tojson with unusual arguments")
        return self.generic_visit(node)

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        if node.dyn_args or node.dyn_kwargs:
            raise NotMeterable("it calls with a list of arguments")
        return self.generic_visit(node)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802 - jinja2 calls it so
        if isinstance(node.value, int) and abs(node.value) > MAX_NUMBER:
            raise NotMeterable("it names a large number")
        return node

    def _payment(self, body: Iterable[nodes.Node]) -> nodes.Node:
        return nodes.ExprStmt(self._paid(body))

    def _paid(self, body: Iterable[nodes.Node]) -> nodes.Expr:
        nodes_alone = look_at_all = 0
        unseen = list(body)
        while unseen:
            node = unseen.pop()
            unseen += node.iter_child_nodes()
            nodes_alone += 1
            look_at_all += isinstance(node, _LOOK_AT_ALL) + _parts(node)
            words = getattr(node, "data" if isinstance(node, nodes.TemplateData) else "value", None)
            nodes_alone += len(words) // BYTES_OF_A_UNIT if isinstance(words, str) else 0
        return _filter(nodes.Const((nodes_alone, look_at_all)), _PAY)


def _parts(node: nodes.Node) -> int:
    """How many values the node combines."""
    if isinstance(node, nodes.Output):
        return sum(not isinstance(one, nodes.TemplateData) for one in node.nodes)
    if isinstance(node, nodes.Concat):
        return len(node.nodes)
    return len(node.items) if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict) else 0


def _filter(value: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(value, name, [], [], None, None)


def _is_short(separator: nodes.Node) -> bool:
    return (
        isinstance(separator, nodes.Const)
        and isinstance(separator.value, str)
        and len(separator.value) <= MAX_SEPARATOR_LENGTH
    )


def _is_plain(option: nodes.Keyword | nodes.Pair) -> bool:
    value = getattr(option.value, "value", None)
    if option.key == "indent":
        return value is None or (isinstance(value, int) and value <= MAX_INDENT)
    return option.key in ("ensure_ascii", "sort_keys") and isinstance(value, bool)
