"""Earlier calls of a conversation, as chat templates want them: arguments as objects. Pure."""

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic_core import from_json

from motet.errors import InvalidRequest
from motet_gateway.errors import wrong
from motet_gateway.request_bodies import Shape, shape_of

MAX_EXACT = 100_000
"""The most values that are looked at one by one, which blocks all other work for some 50 ms."""
MAX_BITS = 1 << 20
"""The most that their integers of more than 64 bits have together. To write one as a string takes the square of its
length: those of 4,300 digits, the most that is parsed, take 25 ms then."""


class EarlierArguments:
    """Those of one conversation. Together they have the bounds of its body, which do not count what is in strings:
    parsing them blocks all other work as parsing the body does."""

    def __init__(self) -> None:
        self._shape = Shape()
        self._seen = 0
        self._bits = 0

    def parse(self, text: str, where: str) -> Any:
        """Raises InvalidRequest if they are too many, and ValueError for what is no JSON."""
        self._shape += shape_of(text.encode(errors="replace"))
        if what := self._shape.too_much:
            raise wrong(where, f"the arguments of earlier calls have more than {what} together; send fewer")
        return self.exact(from_json(text or "{}", allow_inf_nan=False), where)

    def exact(self, arguments: Any, where: str) -> Any:
        """With integers of more than 64 bits as strings: what passes the messages on would refuse these."""
        try:
            orjson.dumps(arguments)
        except TypeError:
            return self._exact(arguments, where)
        return arguments

    def _exact(self, value: Any, where: str) -> Any:
        self._seen += 1
        if self._seen > MAX_EXACT:
            raise _too_long(where, f"and more than {MAX_EXACT} values")
        match value:
            case dict():
                return {name: self._exact(one, where) for name, one in value.items()}
            case list():
                return [self._exact(one, where) for one in value]
            case int() if not -(1 << 63) <= value < 1 << 64:
                self._bits += value.bit_length()
                if self._bits > MAX_BITS:
                    raise _too_long(where, f"that have more than {MAX_BITS} bits together")
                return str(value)
        return value


def read_calls(message: dict[str, Any], where: str, earlier: EarlierArguments) -> None:
    """Check the message's calls and make their arguments objects. Templates look whether there are `tool_calls`: an
    empty list is left out."""
    if not isinstance(message.get("tool_call_id") or "", str):
        raise wrong(f"{where}.tool_call_id", "must be the id of a call, as a string")
    calls = message.pop("tool_calls", None)
    if calls is None or calls == []:
        return
    where = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise wrong(where, "must be a list of calls")
    if message.get("role") != "assistant":
        raise wrong(where, "only messages of the role assistant call tools")
    message["tool_calls"] = [_call(call, f"{where}[{at}]", earlier) for at, call in enumerate(calls)]


def _call(call: Any, where: str, earlier: EarlierArguments) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        raise wrong(f"{where}.type", "must be 'function'")
    if not isinstance(call.get("id") or "", str):
        raise wrong(f"{where}.id", "must be a string")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(f"{where}.function.name", "this field is required")
    arguments = arguments_of(function, f"{where}.function", earlier)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def arguments_of(call: Mapping[str, Any], where: str, earlier: EarlierArguments) -> dict[str, Any]:
    """Of an earlier call, as an object. Raises InvalidRequest."""
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = earlier.parse(arguments, f"{where}.arguments")
        except ValueError:
            arguments = {}
        return arguments if isinstance(arguments, dict) else {}  # a model wrote this: the chat has to go on
    if not isinstance(arguments, dict):
        raise wrong(f"{where}.arguments", "must be a JSON object, as a string")
    exact: dict[str, Any] = earlier.exact(arguments, f"{where}.arguments")
    return exact


def _too_long(where: str, what: str) -> InvalidRequest:
    why = f"the arguments of earlier calls have integers of more than 64 bits {what}; send these integers as strings"
    return wrong(where, why)
