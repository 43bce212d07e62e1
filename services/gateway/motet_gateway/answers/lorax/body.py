"""The body of a request in LoRAX's own API. Pure."""

from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from motet.described_model import DescribedModel
from motet.errors import InvalidRequest, UnsupportedParameter
from motet.grammars.grammar import Grammar
from motet.sampling import IN_BODIES, MAX_TOP_LOGPROBS, OPTIONS
from motet_gateway.grammars.parameters import FIELDS as GRAMMAR_FIELDS
from motet_gateway.grammars.parameters import grammar_of
from motet_gateway.parameters import Body, checked_stops

Refused = tuple[str, tuple[Any, ...]]

_ADAPTERS = "name one adapter in adapter_id; GET /v1/models lists the names"
REFUSED: dict[str, Refused] = {
    "adapter_source": ("adapters are known by their names alone; leave it out", ()),
    "merged_adapters": (_ADAPTERS, ()),
    "api_token": ("the server fetches adapters by itself; leave it out", ()),
    "apply_chat_template": ("use /v1/chat/completions", (False,)),
    "best_of": ("it is not supported", (1,)),
    "decoder_input_details": ("use echo with logprobs on /v1/completions", (False,)),
    "top_n_tokens": ("use return_k_alternatives", ()),
    "typical_p": ("it is not supported", (1, 1.0)),
    "watermark": ("it is not supported", (False,)),
}
"""By name: the reason, and the values that have no effect. null never has one."""
_SAMPLES = ("temperature", "top_k", "top_p")
"""Any of these asks for a draw, as `do_sample` does."""
BESIDE = ("seed", "truncate_prompt_tokens")
"""Fields of all bodies that LoRAX has within `parameters`"""
OPTIONS_OF_LORAX = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "repetition_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "ignore_eos_token": "ignore_eos",
}
"""By their names in LoRAX"""


class GenerateParameters(DescribedModel):
    model_config = ConfigDict(extra="allow", strict=True)

    adapter_id: str | None = None
    """The model that answers, under a name that `GET /v1/models` lists. Unset: the base model, if there is only one."""
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most tokens of an answer. Unset: as many as the context has left."""
    do_sample: bool | None = None
    """Draw the tokens. Unset: only if `temperature`, `top_k` or `top_p` is set; otherwise the most likely ones come."""
    seed: Annotated[int, Field(ge=0, le=(1 << 64) - 1)] | None = None
    """Makes draws repeatable."""
    stop: Any = None
    """The answer ends with the first of these strings: up to 16."""
    truncate: Annotated[int, Field(ge=1)] | None = None
    """Keep only the last tokens of the prompt, this number of them."""
    return_full_text: bool | None = None
    """Put the prompt before the answer."""
    details: bool | None = None
    """Return the tokens, and why the answer has ended."""
    return_k_alternatives: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """How many alternatives are given for each token of the details."""
    response_format: Any = None
    """As in `/v1/chat/completions`; also `{"type": "json_object", "schema": …}`."""
    grammar: Any = None
    """`{"type": "json" or "regex", "value": …}`, as in TGI."""


class GenerateBody(Body):
    prompt_field = "inputs"
    tells_seed = True
    streams: ClassVar[bool | None] = None
    """Whether the path says so; None: the body does."""

    inputs: Annotated[str, Field(min_length=1)]
    """The prompt."""
    parameters: GenerateParameters | None = None
    """What is wanted of the answer."""

    def model_post_init(self, _: Any) -> None:
        if self.streams is not None:
            self.stream = self.streams
        for name in BESIDE:
            if getattr(self, name) is not None:
                raise _misplaced(name)
        said = self.said
        self.model = said.adapter_id or self.model
        self.seed = said.seed
        self.truncate_prompt_tokens = said.truncate
        if self.include_stop_str_in_output is None:
            self.include_stop_str_in_output = True

    @cached_property
    def said(self) -> GenerateParameters:
        return self.parameters or GenerateParameters()

    @cached_property
    def options(self) -> dict[str, Any]:
        extra = {name: value for name, value in (self.said.model_extra or {}).items() if value is not None}
        draws = self.said.do_sample or any(name in extra for name in _SAMPLES)
        # What a model's files say counts only for OpenAI's API.
        options: dict[str, Any] = {"temperature": 1.0 if draws else 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        options["repetition_penalty"] = 1.0
        for name, option in OPTIONS_OF_LORAX.items():
            if name in extra:
                options[option] = OPTIONS[option].check(f"parameters.{name}", extra[name])
        return options

    @cached_property
    def grammar_asked(self) -> tuple[str, Grammar] | None:
        try:
            asked = grammar_of({"response_format": self.said.response_format, "grammar": self.said.grammar})
        except InvalidRequest as error:
            raise type(error)(f"parameters.{error.message}", param=f"parameters.{error.param}") from None
        return None if asked is None else (f"parameters.{asked[0]}", asked[1])

    def unknown_fields(self) -> list[str]:
        known = OPTIONS_OF_LORAX.keys() | REFUSED.keys()
        nested = [f"parameters.{name}" for name in self.said.model_extra or {} if name not in known]
        return [*super().unknown_fields(), *nested]

    def refuse_unsupported(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if value is not None and name in _MISPLACED:
                raise _misplaced(name)
        super().refuse_unsupported()
        extra = self.said.model_extra or {}
        for name, (why, harmless) in REFUSED.items():
            value = extra.get(name)
            if value is not None and not any(value == one and type(value) is type(one) for one in harmless):
                raise UnsupportedParameter(f"parameters.{name}: {why}", param=f"parameters.{name}")
        self.stops()

    def stops(self) -> list[str]:
        return checked_stops("parameters.stop", self.said.stop)

    @property
    def top_logprobs_wanted(self) -> int | None:
        wanted = self.said.details or self.stream
        return (self.said.return_k_alternatives or 0) if wanted else None

    @property
    def alternatives_field(self) -> str:
        return "parameters.return_k_alternatives"

    @property
    def output_limit(self) -> tuple[str, int | None]:
        return "parameters.max_new_tokens", self.said.max_new_tokens


_MISPLACED = frozenset().union(IN_BODIES, GRAMMAR_FIELDS, OPTIONS_OF_LORAX, REFUSED, GenerateParameters.model_fields)
"""Fields beside `parameters` that would act within it, or in another API"""


def _misplaced(name: str) -> UnsupportedParameter:
    return UnsupportedParameter(f"{name}: put it into parameters, under LoRAX's name for it", param=name)


class StreamedBody(GenerateBody):
    streams = True


class WholeBody(GenerateBody):
    streams = False
