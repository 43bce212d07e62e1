"""The options of sampling, each declared once: as a field of `Sampling`, with its bounds, its default and its meaning.

An option has one name: in request bodies, in the message `Sampling` of runner.proto, and in the library. Gateways,
engines, the check of a model's files and the API page read this table, so a wrong value gets the same sentence by every
door. Pure.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar, Self, get_type_hints

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

    of_tokens: ClassVar[bool] = False

    @abstractmethod
    def schema(self) -> Json: ...

    @abstractmethod
    def check(self, name: str, value: Any) -> None:
        """Raises InvalidRequest. `name` is what the request calls it."""

    def stored(self, value: Any) -> Any:
        """A checked value of a request body, or that of a message, as `Sampling` has it."""
        return value


class Flag(Option):
    def schema(self) -> Json:
        return {"type": "boolean"}

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise _error(name, "must be true or false")


@dataclass(frozen=True)
class Number(Option):
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
        number = _is_a(Integral if self.whole else Real, value)
        # No comparison with NaN is true.
        high = number and (value > self.lowest if self.above else value >= self.lowest)
        if not high or not (self.highest is None or value <= self.highest):
            least = f"{'an integer' if self.whole else 'a number'} {'above' if self.above else 'from'} {self.lowest}"
            most = "" if self.highest is None else f"{' and at most' if self.above else ' to'} {self.highest}"
            but = "" if self.whole and isinstance(value, float) else _but(value)  # 1.0 is not an integer
            raise _error(name, f"must be {least}{most}{but}")

    def stored(self, value: Any) -> Any:
        return max(value, 0) if self.whole else value  # messages have no negative integers


@dataclass(frozen=True)
class TokenIds(Option):
    of_tokens = True
    most: int

    def schema(self) -> Json:
        return {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": self.most}

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, list | set | frozenset) or len(value) > self.most:
            raise _error(name, f"must be a list of at most {self.most} token ids")
        for place, token in enumerate(value):
            _check_token(name, token, place=f"[{place}]" if isinstance(value, list) else "")

    def stored(self, value: Any) -> Any:
        return frozenset(value)


@dataclass(frozen=True)
class Biases(Option):
    of_tokens = True
    most: int
    bias: Number

    def schema(self) -> Json:
        return {"type": "object", "additionalProperties": True, "maxProperties": self.most}

    def check(self, name: str, value: Any) -> None:
        if not isinstance(value, Mapping) or len(value) > self.most:
            raise _error(name, f"must have numbers for at most {self.most} token ids")
        for token, bias in self.stored(value).items():
            _check_token(name, token)
            self.bias.check(f"{name}.{token}", bias)

    def stored(self, value: Any) -> Any:
        return {_id(key): bias for key, bias in value.items()}


def _is_a(kind: type, value: Any) -> bool:
    """Also a number of numpy."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _id(key: Any) -> Any:
    """A key of JSON is text."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key


def _check_token(name: str, token: Any, *, place: str = "") -> None:
    if not _is_a(Integral, token) or not 0 <= token < 2**32:
        raise InvalidRequest(f"{name} must have token ids{_but(token)}.", param=name + place)


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
    min_tokens: Annotated[int, Number(0, whole=True, applied_by="execute.adjustment")] = 0
    """No answer ends before it has so many tokens. At most what the answer may have."""
    temperature: Annotated[float, Number(0, 10, of_model=True, usual=1.0, applied_by="execute.sampling_kind")] = 0.0
    """0 always takes the most likely token."""
    top_p: Annotated[float, Number(0, 1, above=True, of_model=True, applied_by="execute.sampling_kind")] = 1.0
    """Sample from the most likely tokens that together have this probability."""
    top_k: Annotated[int, Number(-1, 2**31 - 1, whole=True, of_model=True, applied_by="execute.sampling_kind")] = 0
    """Sample from so many of the most likely tokens; 0 and -1 from all."""
    min_p: Annotated[float, Number(0, 1, of_model=True, applied_by="execute.sampling_kind")] = 0.0
    """Leave out tokens below this part of the most likely token's probability."""
    presence_penalty: Annotated[float, Number(-2, 2, applied_by="execute.adjustment")] = 0.0
    """Lowers tokens that the answer already has, once each."""
    frequency_penalty: Annotated[float, Number(-2, 2, applied_by="execute.adjustment")] = 0.0
    """Lowers tokens that the answer already has, as often as it has them."""
    repetition_penalty: Annotated[
        float, Number(0, 10, above=True, of_model=True, applied_by="execute.adjusted_logits")
    ] = 1.0
    """Divides what prompt and answer already have; 1 changes nothing."""
    logit_bias: Annotated[
        dict[int, float], Biases(1024, Number(-100, 100, applied_by=""), applied_by="execute.adjustment")
    ] = field(default_factory=lambda: NO_BIAS)
    """By token id: what to add to the token, -100 to 100."""
    stop_token_ids: Annotated[frozenset[int], TokenIds(128, applied_by="plan.iteration_results")] = frozenset()
    """The answer ends before the first of these tokens."""
    ignore_eos: Annotated[bool, Flag(applied_by="plan.iteration_results")] = False
    """Go on past the token with which the model ends an answer."""
    logprobs: Annotated[bool, Flag(in_bodies=False, applied_by="execute.sampler")] = False
    """Return the log probability of each token."""
    top_logprobs: Annotated[
        int, Number(0, MAX_TOP_LOGPROBS, whole=True, in_bodies=False, applied_by="execute.sampler")
    ] = 0
    """So many alternatives for each token."""
    prompt_logprobs: Annotated[
        int | None, Number(0, MAX_TOP_LOGPROBS, whole=True, in_bodies=False, applied_by="execute.prompt_logprobs")
    ] = None
    """How many alternatives beside the log probability of each token of the prompt. None: no log probabilities."""

    @classmethod
    def from_proto(cls, message: runner_pb2.Sampling) -> Self:
        """A message has no zeros: an option that is 0 there has its default."""
        said = {one.name: OPTIONS[one.name].stored(value) for one, value in message.ListFields() if one.name in OPTIONS}
        return cls(**({"max_tokens": 0} | said))

    def to_proto(self) -> runner_pb2.Sampling:
        return runner_pb2.Sampling(**dict(self._said()))

    def checked(self, vocabulary: int) -> Self:
        """As the engine computes it. Raises InvalidRequest for the first option that no row of a batch may have."""
        changed = {}
        for name, value in self._said():
            option = OPTIONS[name]
            option.check(name, value)
            if (stored := option.stored(value)) is not value:
                changed[name] = stored
            if option.of_tokens:
                check_tokens(name, stored, vocabulary)
        check_min_tokens(self.min_tokens, self.max_tokens)
        return replace(self, **changed) if changed else self

    def _said(self) -> Iterator[tuple[str, Any]]:
        """The options that do not have their defaults"""
        for name, default in _DEFAULTS.items():
            if (value := getattr(self, name)) is not default:
                yield name, value


def check_tokens(name: str, tokens: Collection[int], vocabulary: int) -> None:
    if tokens and (largest := max(tokens)) >= vocabulary:
        raise _error(name, f"has the token {largest}, which is not in the vocabulary of {vocabulary} tokens")


def check_min_tokens(wanted: int, most: int) -> None:
    if wanted > most:
        raise _error("min_tokens", f"must be at most the {most} tokens that the answer may have, not {wanted}")


_DEFAULTS = {one.name: one.default for one in fields(Sampling)} | {"logit_bias": NO_BIAS}
OPTIONS: Mapping[str, Option] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Sampling, include_extras=True).items()
}
IN_BODIES = {name: option for name, option in OPTIONS.items() if option.in_bodies}
USUAL = {name: option.usual for name, option in OPTIONS.items() if option.usual is not None}
