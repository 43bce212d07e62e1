"""A choice from its request to its end: what was ordered, who gets its tokens, and where it stands."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from motet.api.v1 import common_pb2, runner_pb2, scheduler_pb2
from motet.errors import MotetError
from motet_gateway.choice_record import ChoiceRecord
from motet_gateway.generation import EndReason, Generation
from motet_gateway.pauses import Pause


class TokenSink(Protocol):
    """Gets the tokens of one choice. None of its methods may block."""

    def placed(self) -> None: ...

    def waiting(self, for_what: str) -> None:
        """Why the choice makes no tokens at the moment; empty: it can make some."""

    def score(self, logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        """Of the next tokens of the prompt; the first call begins with its second token."""

    def deliver(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None: ...

    def end(self, how: EndReason | MotetError) -> None:
        """The last call, made once."""


def whole_salt(namespace_uid: str, own: str) -> str:
    """What a request is salted with beside its tenant's name. A namespace that is made again may have another owner,
    who must not find out what the one before has asked."""
    return f"{namespace_uid}\n{own}" if namespace_uid else own


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What the scheduler and a runner need to know about one choice."""

    request: str
    tenant: str
    group: str
    adapter: str
    adapter_digest: str
    base_digest: str
    """Of the base model that the prompt was tokenised for. No other one may answer it."""
    request_class: "common_pb2.RequestClass.ValueType"
    prompt_ids: Sequence[int]
    choice: int
    sampling: runner_pb2.Sampling
    seed: int
    estimate: common_pb2.Estimate
    deadline_seconds: float
    seed_is_drawn: bool = False
    """The client has set none, and is told none."""
    parent: str = ""
    """The first choice with the same prompt; empty: this is it."""
    prompt_number: int = 0
    """Of the prompt, if several choices have it: a runner gets it once (`motet.kept_prompts`)."""
    choices: int = 1
    """How many choices have the same prompt, with this one."""
    prefix_hints: Sequence[int] = ()
    """Of the first blocks of the prompt (`motet.prefix_hints`)."""
    features: Sequence[int] = ()
    """Of the prompt, for the predictor (`prompt_features`)."""
    key: scheduler_pb2.KeyAccount | None = None
    """The API key, if it has limits of its own."""
    scores_only: bool = False
    """The client wants the prompt's log probabilities and no answer. An engine computes one token at least; nobody gets
    it, and it is not counted."""
    scores_for: Sequence[str] = ()
    """The fields that ask for log probabilities of the prompt"""
    cache_salt: str = ""
    """Of the client. Only requests with the same one share cached prompts."""
    namespace_uid: str = ""
    """Of the tenant's namespace, as far as the operator says it."""
    traceparent: str = ""
    """Of the client's trace"""

    @property
    def whole_salt(self) -> str:
        return whole_salt(self.namespace_uid, self.cache_salt)


@dataclass(slots=True)
class LiveChoice:
    order: GenerationRequest
    sink: TokenSink
    asked_at: float
    record: ChoiceRecord
    generation: Generation = field(init=False)
    heard_at: float = field(init=False)
    """When a runner last sent something for it."""
    admitted: bool = False
    """A scheduler has let it in: no quota refuses it any more."""
    pause: Pause | None = None
    """Since it has lost its runner, until its next token."""

    def __post_init__(self) -> None:
        self.heard_at = self.asked_at
        scores = self.order.sampling.HasField("prompt_logprobs")
        to_score = len(self.order.prompt_ids) if scores else 0
        self.generation = Generation(base=self.order.base_digest, to_score=to_score, scores_for=self.order.scores_for)

    @property
    def counted_tokens(self) -> int:
        """Tokens of the answer so far."""
        return 0 if self.order.scores_only else len(self.generation.delivered)
