"""What this engine asks of vLLM, as plain values. `surface` does it with vLLM, and tests without."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from motet_runner.interface import Logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known once vLLM has loaded the model."""

    version: str
    blocks: int
    """Of KV, that requests can have"""
    block_tokens: int
    groups: int
    """Of layers whose KV has blocks of its own. A row has blocks in each group."""
    architecture: str
    layers: int
    vocabulary: int
    max_model_length: int
    bytes_per_token: int
    """Of KV, on each device"""
    dtype: str
    device: str
    shares_prefixes: bool
    """A request that begins with the tokens of an earlier one finds their KV, if both have the same salt."""
    quantization: str = ""
    """Of the base model or of KV; empty: none"""
    gpu: str = ""
    """Its model; empty: the CPU computes"""
    gpu_number: str = ""
    """That no other GPU has"""
    noise_by_position: bool = False
    """True if the noise of a seed depends on the place of the token that is drawn, as a number of the whole request."""


class Penalties(NamedTuple):
    """Of the tokens that the answer has"""

    presence: float = 0.0
    frequency: float = 0.0


class Ask(NamedTuple):
    """The next tokens of one row. vLLM knows nothing of it from earlier."""

    name: str
    """Never used twice"""
    tokens: Sequence[int]
    options: dict[str, Any]
    """The arguments of `SamplingParams`"""
    adapter: int
    """Its number; 0: the base model"""
    salt: str
    """Only requests with the same salt share KV."""
    masked: bool = False
    """It draws only from what `allow` said last."""
    penalties: Penalties = Penalties()
    output_tokens: int = 0
    """How many of `tokens` are the answer's, and not the prompt's"""


class Produced(NamedTuple):
    name: str
    token: int
    logprobs: Logprobs | None
    ended: bool
    """vLLM has forgotten the request."""
    prompt_logprobs: tuple[float, ...] = ()
    """Of the prompt's tokens but the first, if they were asked for"""


class LostStep(RuntimeError):
    """vLLM does not compute what it was asked to."""


class AnswersLost(RuntimeError):
    """Nobody knows any more what some workers have done: this process is to end."""


class Driven(Protocol):
    facts: Facts

    def check(self, options: dict[str, Any]) -> None:
        """Raises what vLLM raises for options that it does not take."""

    def add(self, ask: Ask) -> None: ...

    def allow(self, name: str, allowed: bytes) -> None:
        """The next tokens that a masked request may have, at least one: a bit for each token of the vocabulary, the
        first one in the lowest bit. To be called before each step that computes it."""

    def abort(self, names: list[str]) -> None: ...

    def step(self) -> list[Produced]:
        """One more token of each request whose tokens are all computed, or nothing yet: then it is to be called again,
        because iterations overlap. An error that is raised ends this process."""

    def blocks_in_use(self) -> int:
        """Of KV, by the requests that are there"""

    def stops(self) -> int:
        """How many requests vLLM has stopped because it lacked blocks"""

    def load_adapter(self, number: int, folder: Path) -> None:
        """Raises what vLLM raises for an adapter that it does not take, or AnswersLost. The folder may be removed
        afterwards."""

    def remove_adapter(self, number: int) -> None:
        """No request uses it any more."""
