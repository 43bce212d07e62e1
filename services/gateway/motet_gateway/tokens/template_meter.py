"""Counts the work of a chat template while it runs, so that it may run on the event loop.

Everything that a template makes or reads is paid for from one budget before it is made or read: each node of the
template that is executed, each character of new text, each item of a list. A value may be named, repeated and put into
others without a price, since that costs a fixed time, however large it is.

What has no known price is refused (`NotMeterable`). The template must then run in a process that the kernel can end.
"""

import operator
from collections.abc import Callable, KeysView, Mapping, Sequence
from typing import Any, Final

import jinja2
from jinja2.filters import FILTERS
from jinja2.runtime import Context, Macro
from jinja2.tests import TESTS
from jinja2.utils import Namespace, pass_context
from markupsafe import Markup

from motet.chat_environment import ChatEnvironment
from motet_gateway.tokens.chat_template import CannotRender

BUDGET = 25_000
"""Units of work per rendering. One unit is about as long as jinja2 takes for one node of a template. Ten messages with
a template of today's large models take up to half of it."""
COPIED_CHARACTERS = 32
"""Characters of text that are made for one unit."""
CONVERTED_CHARACTERS = 8
"""Characters for one unit where each is looked at by itself: in another case, or in the text of a list. One may become
twelve (an escaped character outside of the basic plane in JSON)."""
COMPARED_CHARACTERS = 128
"""Comparisons of two characters in a search for one unit. A search may compare each character with each."""
MAX_INDENT = 8
INDENTED_ITEM = 8
"""Units for each item of indented JSON, which is encoded in Python."""
MAX_SEPARATOR_LENGTH = 64
MAX_DATE_FORMAT_LENGTH = 64
DATE = 64
"""Units to format the date."""
MAX_NUMBER = 1 << 63

# Names that no template can contain.
PAY, WRITE, JOIN_ALL, ADD_ALL = "motet: pay", "motet: write", "motet: join all", "motet: add all"
SLICE, LOOK_UP, COMPARE = "motet: slice", "motet: look up", "motet: compare"
METERED_TESTS = frozenset(
    {
        *("defined", "undefined", "none", "true", "false", "boolean", "string", "number", "integer", "float"),
        *("mapping", "sequence", "iterable", "callable", "sameas"),
    }
)
"""Others compare, search or format: `odd` formats a text."""
_STR_METHODS = frozenset(
    {
        *("strip", "lstrip", "rstrip", "split", "rsplit", "partition", "rpartition", "splitlines"),
        *("startswith", "endswith", "find", "rfind", "removeprefix", "removesuffix"),
        *("upper", "lower", "title", "capitalize", "isdigit", "isspace"),
    }
)
_DICT_METHODS = frozenset({"items", "keys", "values", "get"})
_JINJAS_OPTIONS = frozenset({"_loop_vars", "_block_vars"})
"""jinja2 adds them to calls and removes them again."""
_SPLITS = frozenset({"split", "rsplit", "splitlines"})
_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


class NotMeterable(CannotRender):
    """The template uses something that is not counted, or has used up its budget."""


class MeteredEnvironment(ChatEnvironment):
    """Counts the work of one rendering at a time. Runs only what `metered_template` has compiled."""

    intercepted_binops = frozenset({"*", "%", "**"})

    def __init__(self) -> None:
        super().__init__()
        self._left = 0
        self._raise_exception: Final = self.globals["raise_exception"]
        self._strftime_now: Final = self.globals["strftime_now"]
        self._plain_tojson: Final = self.filters["tojson"]
        self.filters = {name: FILTERS[name] for name in ("length", "count", "first", "last", "default", "d", "items")}
        self.filters |= {"trim": self._trim, "list": self._list, "join": self._join, "tojson": self._tojson}
        self.filters |= {"upper": self._upper, "lower": self._lower, "capitalize": self._capitalize}
        self.filters |= {"string": self._text, "safe": self._safe, PAY: self._pay_in_template, WRITE: self._write}
        self.filters |= {JOIN_ALL: self._join_all, ADD_ALL: self._add_all, SLICE: self._slice}
        self.filters |= {LOOK_UP: self._look_up, COMPARE: self._compare}
        self.tests = {name: TESTS[name] for name in METERED_TESTS}

    def begin(self) -> None:
        self._left = BUDGET

    def _pay(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise NotMeterable("it takes too many steps")

    def _pay_to_read(self, value: Any, indent: int = 0) -> None:
        """Pay for all parts of a value, each as often as it occurs, before something looks at them."""
        level, depth = [value], 0
        while level:
            if indent:
                self._pay(len(level) * (INDENTED_ITEM + indent * depth // COPIED_CHARACTERS))
            deeper: list[Any] = []
            for part in level:
                if isinstance(part, str):
                    self._pay(1 + len(part) // CONVERTED_CHARACTERS)
                elif isinstance(part, list | tuple):
                    self._pay(1 + len(part))
                    deeper += part
                elif isinstance(part, dict):
                    self._pay(1 + 2 * len(part))
                    deeper += part
                    deeper += part.values()
                elif part is None or isinstance(part, int | float | jinja2.Undefined):
                    self._pay(1)
                else:
                    raise NotMeterable(f"it reads a {type(part).__name__}")
            level, depth = deeper, depth + 1

    def _text(self, value: Any) -> str:
        """The value as text, paid for as if it were copied."""
        if isinstance(value, str):
            text = value
        else:
            self._pay_to_read(value)
            text = str(value)
        if len(text) >= COPIED_CHARACTERS:
            self._pay(len(text) // COPIED_CHARACTERS)
        return text

    # ------------------------------------------------------------------------------ in the place of jinja2's own code

    # jinja2 computes no filter that needs the context at compile time.

    @pass_context
    def _pay_in_template(self, _: Context, units: int) -> bool:
        self._pay(units)
        return True

    @pass_context
    def _write(self, _: Context, value: Any) -> str:
        return self._text(value)

    @pass_context
    def _join_all(self, _: Context, parts: Sequence[Any]) -> str:
        return "".join([self._text(part) for part in parts])

    @pass_context
    def _add_all(self, _: Context, parts: Sequence[Any]) -> Any:
        if all(type(part) is str for part in parts):
            self._pay(sum(map(len, parts)) // COPIED_CHARACTERS)
            return "".join(parts)
        total = parts[0]
        for part in parts[1:]:
            if isinstance(total, str) and isinstance(part, str):
                self._pay((len(total) + len(part)) // CONVERTED_CHARACTERS)  # one that is safe escapes the other
            elif isinstance(total, list | tuple) and isinstance(part, list | tuple):
                self._pay(len(total) + len(part))
            total = total + part
        return total

    @pass_context
    def _slice(self, _: Context, value: Any, *bounds: int | None) -> Any:
        part = value[slice(*bounds)]
        self._pay(len(part) // COPIED_CHARACTERS if isinstance(part, str) else len(part))
        return part

    @pass_context
    def _compare(self, _: Context, left: Any, right: Any, how: str) -> bool:
        if how in ("in", "notin"):
            self._pay_for_search(left, right)
        elif not (isinstance(left, int | float) and isinstance(right, int | float)):
            self._pay_to_read(left)
            self._pay_to_read(right)
        return bool(_COMPARISONS[how](left, right))

    def _pay_for_search(self, what: Any, where: Any) -> None:
        if isinstance(where, str) and isinstance(what, str):
            self._pay(len(where) // COPIED_CHARACTERS + len(where) * len(what) // COMPARED_CHARACTERS)
        elif isinstance(where, dict | KeysView):
            self._check_key(what)
        else:
            self._pay_to_read(what)
            self._pay_to_read(where)

    def _check_key(self, key: Any) -> None:
        """The hash of a tuple reads all parts, as often as they occur."""
        if isinstance(key, tuple):
            raise NotMeterable("it looks up a tuple")

    @pass_context
    def _look_up(self, _: Context, value: Any, key: Any) -> Any:
        self._check_key(key)
        return self.getitem(value, key)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        # With text they would repeat it or pad it to any width.
        if operator == "**" or not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise NotMeterable(f"it uses {operator} for more than numbers")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and abs(result) > MAX_NUMBER:
            raise NotMeterable("it makes a large number")
        return result

    def call(self, context: Context, called: Any, /, *arguments: Any, **options: Any) -> Any:
        if not isinstance(called, Macro):
            named = [value for name, value in options.items() if name not in _JINJAS_OPTIONS]
            self._pay_for_call(called, [*arguments, *named], bool(arguments))
        return super().call(context, called, *arguments, **options)

    def _pay_for_call(self, called: Any, arguments: Sequence[Any], by_position: bool) -> None:
        owner = getattr(called, "__self__", None)
        if type(owner) is str and called.__name__ in _STR_METHODS:
            self._pay_for_str_method(owner, called.__name__, arguments)
        elif type(owner) is dict and called.__name__ in _DICT_METHODS:
            for argument in arguments:
                self._check_key(argument)
        elif called is self._raise_exception:
            for argument in arguments:
                self._pay_to_read(argument)
        elif called is self._strftime_now:
            if not all(isinstance(one, str) and len(one) <= MAX_DATE_FORMAT_LENGTH for one in arguments):
                raise NotMeterable("it formats the date in an unusual way")
            self._pay(DATE)
        elif called is not Namespace or by_position:  # a namespace may copy what it gets by position
            raise NotMeterable("it calls what is not counted")

    def _pay_for_str_method(self, text: str, name: str, arguments: Sequence[Any]) -> None:
        looked_for = 0
        for argument in arguments:
            if isinstance(argument, str):
                looked_for += len(argument)
            elif argument is not None and not isinstance(argument, int):
                raise NotMeterable(f"it calls {name} with a {type(argument).__name__}")
        self._pay(len(text) // CONVERTED_CHARACTERS + len(text) * looked_for // COMPARED_CHARACTERS)
        if name in _SPLITS:
            separator = arguments[0] if arguments else None
            self._pay(1 + (text.count(separator) if isinstance(separator, str) and separator else len(text)))

    # ------------------------------------------------------------------------------------------------------- filters

    def _trim(self, value: Any, chars: str | None = None) -> str:
        text = self._text(value)
        self._pay(len(text) * len(chars or "") // COMPARED_CHARACTERS)
        return text.strip(chars)

    def _list(self, value: Any) -> list[Any]:
        self._pay(self._length(value))
        return list(value)

    def _join(self, value: Any, d: Any = "", attribute: Any = None) -> str:
        if attribute is not None:
            raise NotMeterable("it joins attributes")
        self._pay(self._length(value))
        parts = [self._text(part) for part in value]
        separator = self._text(d)
        self._pay(len(separator) * len(parts) // COPIED_CHARACTERS)
        return str(separator).join(parts)

    def _length(self, value: Any) -> int:
        if not isinstance(value, str | list | tuple | dict | jinja2.Undefined):
            raise NotMeterable(f"it lists a {type(value).__name__}")
        return len(value)

    def _safe(self, value: Any) -> Markup:
        return Markup(self._text(value))  # noqa: S704 - nothing here is shown as HTML

    def _upper(self, value: Any) -> str:
        return self._converted(value).upper()

    def _lower(self, value: Any) -> str:
        return self._converted(value).lower()

    def _capitalize(self, value: Any) -> str:
        return self._converted(value).capitalize()

    def _converted(self, value: Any) -> str:
        text = self._text(value)
        self._pay(len(text) // CONVERTED_CHARACTERS)
        return text

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Sequence[str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        if not (indent is None or (isinstance(indent, int) and 0 <= indent <= MAX_INDENT)):
            raise NotMeterable("it indents JSON in an unusual way")
        for separator in separators or ():
            if not (isinstance(separator, str) and len(separator) <= MAX_SEPARATOR_LENGTH):
                raise NotMeterable("it separates JSON in an unusual way")
        self._pay_to_read(value, INDENTED_ITEM if indent is not None else 0)
        return self._text(
            self._plain_tojson(
                value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
            )
        )
