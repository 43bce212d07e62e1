"""The options of sampling, each declared once: as a field of `Sampling`, with its bounds, its default and its meaning.

An option has one name: in request bodies, in the message `Sampling` of runner.proto, and in the library. Gateways,
engines, the check of a model's files and the API page read this table, so a wrong value gets the same sentence by every
door. Pure.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from numbers import Integral, Real
from operator import attrgetter
from typing import Annotated, Any, Self, get_type_hints

from motet.api.v1 import runner_pb2
from motet.errors import InvalidRequest

Json = dict[str, Any]

MAX_TOP_LOGPROBS = 20
NO_BIAS: dict[int, float] = {}


@dataclass(frozen=True)
class Option(ABC):
    _: KW_ONLY
    applied_by: str
    """The module of `motet_runner` that computes it."""
    in_bodies: bool = True
    """Request bodies have a field of this name, and the gateway needs no code for it."""
    of_model: bool = False
    """Where a request body leaves it out, the model's generation_config.json decides."""
    usual: float | None = None
    """Where neither decides. None: the default of `Sampling`."""

    @abstractmethod
    def schema(self) -> Json: ...

    @abstractmethod
    def check(self, name: str, value: Any) -> Any:
        """The value as `Sampling` has it. Raises InvalidRequest. `name` is what the request calls it."""

    def from_message(self, value: Any) -> Any:
        """A message's value as `Sampling` has it: no other process can be sent a message's container."""
        return value

    def to_message(self, value: Any) -> Any:
        return value


class Flag(Option):
    def schema(self) -> Json:
        return {"type": "boolean"}

    def check(self, name: str, value: Any) -> Any:
        if not isinstance(value, bool):
            raise _error(name, "must be true or false")
        return value


_LEAST = 1e-6
"""What must be above 0 is at least this: a message, which has 32 bits, would say 0 of less, and what is divided by it
would be infinite."""


@dataclass(frozen=True)
class Range:
    """Which numbers are right."""

    lowest: float
    highest: float | None = None
    above: bool = False
    """`lowest` itself is too low."""
    whole: bool = False

    def schema(self) -> Json:
        lowest = {"exclusiveMinimum" if self.above else "minimum": self.lowest}
        highest = {} if self.highest is None else {"maximum": self.highest}
        return {"type": "integer" if self.whole else "number"} | lowest | highest

    def check(self, name: str, value: Any) -> None:
        kind = type(value)  # the usual ones first: to ask for Real or Integral takes longer than all the rest
        number = kind is int or (kind is float and not self.whole) or _is_a(Integral if self.whole else Real, value)
        # No comparison with NaN is true.
        high = number and (value > self.lowest if self.above else value >= self.lowest)
        if not high or not (self.highest is None or value <= self.highest):
            least = f"{'an integer' if self.whole else 'a number'} {'above' if self.above else 'from'} {self.lowest}"
            most = "" if self.highest is None else f"{' and at most' if self.above else ' to'} {self.highest}"
            but = "" if self.whole and isinstance(value, float) else _but(value)  # 1.0 is not an integer
            raise _error(name, f"must be {least}{most}{but}")


@dataclass(frozen=True)
class Number(Range, Option):
    def check(self, name: str, value: Any) -> Any:
        value = whole(value) if self.whole else value
        super().check(name, value)
        if self.whole:
            return max(value, 0)  # messages have no negative integers
        return max(value, _LEAST) if self.above else value


def whole(value: Any) -> Any:
    """To JSON, 16.0 is an integer."""
    return int(value) if type(value) is float and value.is_integer() else value


@dataclass(frozen=True)
class TokenIds(Option):
    most: int
    least: int = 0

    def schema(self) -> Json:
        least = {"minItems": self.least} if self.least else {}
        return {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": self.most} | least

    def check(self, name: str, value: Any) -> Any:
        if not isinstance(value, list | set | frozenset) or not self.least <= len(value) <= self.most:
            many = f"{self.least} to {self.most}" if self.least else f"at most {self.most}"
            raise _error(name, f"must be a list of {many} token ids")
        for place, token in enumerate(value):
            _check_token(name, token, place=f"[{place}]" if isinstance(value, list) else "")
        return frozenset(value)

    def from_message(self, value: Any) -> Any:
        return frozenset(value)


@dataclass(frozen=True)
class Biases(Option):
    most: int
    bias: Range

    def schema(self) -> Json:
        return {"type": "object", "additionalProperties": True, "maxProperties": self.most}

    def check(self, name: str, value: Any) -> Any:
        if not isinstance(value, Mapping) or len(value) > self.most:
            raise _error(name, f"must have numbers for at most {self.most} token ids")
        biases = {_id(key): bias for key, bias in value.items()}
        for token, bias in biases.items():
            _check_token(name, token)
            self.bias.check(f"{name}.{token}", bias)
        return biases

    def from_message(self, value: Any) -> Any:
        return dict(value)


@dataclass(frozen=True)
class TokenLists(Option):
    """Bodies have texts instead, and the gateway makes them into tokens."""

    most: int
    longest: int

    def schema(self) -> Json:
        return {"type": "array", "items": {"type": "string"}, "maxItems": self.most}

    def check(self, name: str, value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) > self.most:
            raise _error(name, f"must have at most {self.most} lists of token ids")
        for tokens in value:
            if not isinstance(tokens, list | tuple) or not 1 <= len(tokens) <= self.longest:
                raise _error(name, f"must have lists of 1 to {self.longest} token ids")
            for token in tokens:
                _check_token(name, token)
        return tuple(map(tuple, value))

    def from_message(self, value: Any) -> Any:
        return tuple(tuple(one.ids) for one in value)

    def to_message(self, value: Any) -> Any:
        return [runner_pb2.Tokens(ids=tokens) for tokens in value]


def _is_a(kind: type, value: Any) -> bool:
    """Also a number of numpy."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _id(key: Any) -> Any:
    """A key of JSON is text, and of one way to write it."""
    return int(key) if isinstance(key, str) and re.fullmatch("0|[1-9][0-9]{0,8}", key) else key


def _check_token(name: str, token: Any, *, place: str = "") -> None:
    if not _is_a(Integral, token) or not 0 <= token < 2**32:
        but = "" if isinstance(token, float) else _but(token)  # 1.0 is not an integer
        raise InvalidRequest(f"{name} must have token ids, which are integers{but}.", param=name + place)


def _but(value: Any) -> str:
    """The value, if it is short. A message has rounded it to 32 bits."""
    if isinstance(value, str):
        return f", not {value[:32]!a}"
    if not _is_a(Real, value) or not abs(value) < 2**64:
        return ""
    return f", not {int(value) if value == int(value) else f'{value:.7g}'}"


def _error(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {what}.", param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What an engine does for one request. The docstrings are those of request bodies, too."""

    max_tokens: Annotated[int, Number(1, whole=True, in_bodies=False, applied_by="plan.iteration_results")]
    """Output tokens, delivered ones included."""
    min_tokens: Annotated[int, Number(0, whole=True, applied_by="execute.sample.adjustment")] = 0
    """The fewest tokens of an answer: it does not end before. At most what the answer may have."""
    temperature: Annotated[
        float, Number(0, 10, of_model=True, usual=1.0, applied_by="execute.sample.sampling_kind")
    ] = 0.0
    """0 always takes the most likely token."""
    top_p: Annotated[float, Number(0, 1, above=True, of_model=True, applied_by="execute.sample.sampling_kind")] = 1.0
    """Sample from the most likely tokens that together have this probability."""
    top_k: Annotated[
        int, Number(-1, 2**31 - 1, whole=True, of_model=True, applied_by="execute.sample.sampling_kind")
    ] = 0
    """How many of the most likely tokens to sample from; 0 and -1: all."""
    min_p: Annotated[float, Number(0, 1, of_model=True, applied_by="execute.sample.sampling_kind")] = 0.0
    """Leave out tokens below this part of the most likely token's probability."""
    presence_penalty: Annotated[float, Number(-2, 2, applied_by="execute.sample.adjustment")] = 0.0
    """Lowers tokens that the answer already has, once each."""
    frequency_penalty: Annotated[float, Number(-2, 2, applied_by="execute.sample.adjustment")] = 0.0
    """Lowers tokens that the answer already has, as often as it has them."""
    repetition_penalty: Annotated[
        float, Number(0, 10, above=True, of_model=True, applied_by="execute.sample.host_adjustments")
    ] = 1.0
    """Divides what prompt and answer already have; 1 changes nothing."""
    logit_bias: Annotated[dict[int, float], Biases(1024, Range(-100, 100), applied_by="execute.sample.adjustment")] = (
        field(default_factory=lambda: NO_BIAS)
    )
    """By token id: what to add to the token, -100 to 100."""
    stop_token_ids: Annotated[frozenset[int], TokenIds(128, applied_by="plan.iteration_results")] = frozenset()
    """The answer ends before the first of these tokens."""
    allowed_token_ids: Annotated[frozenset[int], TokenIds(1024, least=1, applied_by="listed_tokens")] = frozenset()
    """The answer has only these tokens. Without one that ends an answer among them, it ends at `max_tokens`."""
    bad_words: Annotated[
        tuple[tuple[int, ...], ...], TokenLists(256, 1024, in_bodies=False, applied_by="listed_tokens")
    ] = ()
    """Tokens that the answer has nowhere in this order."""
    ignore_eos: Annotated[bool, Flag(applied_by="plan.iteration_results")] = False
    """Go on past the token with which the model ends an answer."""
    logprobs: Annotated[bool, Flag(in_bodies=False, applied_by="execute.sample.row_layout")] = False
    """Return the log probability of each token."""
    top_logprobs: Annotated[
        int, Number(0, MAX_TOP_LOGPROBS, whole=True, in_bodies=False, applied_by="execute.sample.logprobs")
    ] = 0
    """How many alternatives are given for each token."""
    prompt_logprobs: Annotated[
        int | None,
        Number(0, MAX_TOP_LOGPROBS, whole=True, in_bodies=False, applied_by="execute.sample.prompt_logprobs"),
    ] = None
    """How many alternatives beside the log probability of each token of the prompt. None: no log probabilities."""

    @classmethod
    def from_proto(cls, message: runner_pb2.Sampling) -> Self:
        """A message has no zeros: an option that is 0 there has its default."""
        fields = [(one.name, value) for one, value in message.ListFields() if one.name in OPTIONS]
        return cls(**({"max_tokens": 0} | {name: OPTIONS[name].from_message(value) for name, value in fields}))

    def to_proto(self) -> runner_pb2.Sampling:
        return runner_pb2.Sampling(**{name: OPTIONS[name].to_message(value) for name, value in self._said()})

    def checked(self, vocabulary: int) -> Self:
        """As the engine computes it. Raises InvalidRequest for the first option that no row of a batch may have."""
        changed = {}
        for name, value in self._said():
            if (stored := OPTIONS[name].check(name, value)) is not value:
                changed[name] = stored
        made = replace(self, **changed) if changed else self
        made.check_fit(vocabulary)
        return made

    def check_fit(self, vocabulary: int) -> None:
        """What no option can say alone: whether they fit the model, and each other."""
        for name in _OF_TOKENS:
            check_tokens(name, getattr(self, name), vocabulary)
        check_tokens("bad_words", [max(tokens) for tokens in self.bad_words], vocabulary)
        check_min_tokens(self.min_tokens, self.max_tokens)

    def _said(self) -> Iterator[tuple[str, Any]]:
        """The options that do not have their defaults."""
        for (name, default), value in zip(_DEFAULTS.items(), _values_of(self), strict=True):
            if value is not default and not (type(value) is type(default) and value == default):
                yield name, value


def check_tokens(name: str, tokens: Collection[int], vocabulary: int) -> None:
    if tokens and (largest := max(tokens)) >= vocabulary:
        raise _error(name, f"has the token {largest}, which is not in the vocabulary of {vocabulary} tokens")


def check_min_tokens(wanted: int, most: int) -> None:
    if wanted > most:
        raise _error("min_tokens", f"must be at most the {most} tokens that the answer may have, not {wanted}")


_DEFAULTS = {one.name: one.default for one in fields(Sampling)} | {"logit_bias": NO_BIAS}
_values_of = attrgetter(*_DEFAULTS)
OPTIONS: Mapping[str, Option] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Sampling, include_extras=True).items()
}
_OF_TOKENS = [name for name, option in OPTIONS.items() if isinstance(option, TokenIds | Biases)]
IN_BODIES = {name: option for name, option in OPTIONS.items() if option.in_bodies}
USUAL = {name: option.usual for name, option in OPTIONS.items() if option.usual is not None}
