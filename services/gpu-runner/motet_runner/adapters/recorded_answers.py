"""Reads `motet_proof.json`, and compares what a runner computes with it.

The file has greedy answers to a few prompts, with the log probability of each token, as PEFT has computed them where
the adapter was trained. A base model with other weights, or an option of the adapter that is lost or ignored, gives
other ones. `motet adapter record` writes the file. It is a tenant's: everything in it is bounded.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from motet.digest import RECORD_FILE
from motet.errors import AdapterIncompatible
from motet_runner.adapters.strict_json import parse
from motet_runner.sources.file_selection import MAX_RECORD_BYTES

MAX_ANSWERS = 8
MAX_PROMPT_CHARS = 4_000
MAX_PROMPT_TOKENS = 256
MAX_ANSWER_TOKENS = 64
MAX_WORD_CHARS = 100
"""Of what is only shown to people"""
MAX_TOKEN = 1 << 24
"""The most tokens of any vocabulary: the largest ones have a sixtieth of it"""
LEAST_LOGPROB = -100.0
"""Below that of any token that is the most likely one"""

MAX_DIFFERENCE = 1e6
"""What is said of one that is no number, too"""

ALLOWED = {"float32": 1e-3}
ALLOWED_IN_16_BITS = 0.1
"""The largest allowed difference of a log probability, if the base model is computed in 16 bits here or was there. With
small models and bfloat16, 0.03 was seen. A base model with 3 % of noise is off by 0.14 and more."""

NO_RECORD = "RecordMissing"
"""The reason of a refusal: the manifest asks for recorded answers, and there are none to compare"""

Token = Annotated[int, Field(ge=0, lt=MAX_TOKEN)]
Logprob = Annotated[float, Field(ge=LEAST_LOGPROB, le=0.0)]
Dtype = Literal["float32", "bfloat16", "float16"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RecordedAnswer(_Strict):
    prompt: str = Field(max_length=MAX_PROMPT_CHARS)
    """The whole text before the answer, as the chat template has made it"""
    prompt_ids: list[Token] = Field(min_length=1, max_length=MAX_PROMPT_TOKENS)
    answer_ids: list[Token] = Field(min_length=1, max_length=MAX_ANSWER_TOKENS)
    logprobs: list[Logprob] = Field(max_length=MAX_ANSWER_TOKENS)
    """Of each token of the answer"""

    @model_validator(mode="after")
    def _one_for_each_token(self) -> "RecordedAnswer":
        if len(self.logprobs) != len(self.answer_ids):
            raise ValueError(f"{len(self.answer_ids)} answer_ids have {len(self.logprobs)} logprobs")
        return self


class RecordedAnswers(_Strict):
    version: Literal[1]
    recorded_by: str = Field(max_length=MAX_WORD_CHARS)
    """The versions of the libraries, for people"""
    dtype: Dtype
    """Of the base model"""
    quantization: str = Field(max_length=MAX_WORD_CHARS)
    """Of the base model; empty: none. Its answers differ from those of the model without it."""
    special_tokens: bool
    """Whether the tokenizer adds its special tokens to the prompts"""
    answers: list[RecordedAnswer] = Field(min_length=1, max_length=MAX_ANSWERS)

    def encode(self) -> bytes:
        return orjson.dumps(self.model_dump(), option=orjson.OPT_APPEND_NEWLINE)

    def check_positions(self, most: int) -> None:
        """Raises AdapterIncompatible for an answer that does not fit into the base model's context."""
        longest = max(len(answer.prompt_ids) + len(answer.answer_ids) for answer in self.answers)
        if longest > most:
            raise other_base(f"one has {longest} tokens with its prompt, and the base model takes {most}")

    def check_vocabulary(self, size: int) -> None:
        """Raises AdapterIncompatible for a token that the base model does not have."""
        highest = max(token for answer in self.answers for token in (*answer.prompt_ids, *answer.answer_ids))
        if highest >= size:
            raise other_base(f"they have the token {highest}, and the base model's vocabulary has {size} tokens")

    def check_prompts(self, tokenizer: Any) -> None:
        """`tokenizer`: the base model's, of transformers; None: it has none. Raises AdapterIncompatible if it makes
        other tokens of a prompt than where the answers were recorded."""
        for number, answer in enumerate(self.answers if tokenizer is not None else (), 1):
            tokens = tokenizer(answer.prompt, add_special_tokens=self.special_tokens)["input_ids"]
            if list(tokens) != answer.prompt_ids:
                raise other_base(f"they were recorded with another tokenizer, as the tokens of prompt {number} show")

    def compare(self, logprobs: Sequence[Sequence[float]], dtype: str, quantization: str = "") -> "Comparison":
        """`logprobs`: of the tokens of each answer, as they are computed here with a base model in `dtype`, or so
        quantized"""
        found = list(self._differences(logprobs))
        return Comparison(
            answers=len(self.answers),
            tokens=len(found),
            largest=max(found),
            allowed=max(ALLOWED.get(one, ALLOWED_IN_16_BITS) for one in (dtype, self.dtype)),
            quantization=self.quantization or quantization,
        )

    def _differences(self, logprobs: Sequence[Sequence[float]]) -> Iterator[float]:
        for answer, computed in zip(self.answers, logprobs, strict=True):
            for recorded, ours in zip(answer.logprobs, computed, strict=True):
                difference = abs(recorded - ours)
                yield min(difference, MAX_DIFFERENCE) if math.isfinite(difference) else MAX_DIFFERENCE


class Comparison(NamedTuple):
    answers: int
    tokens: int
    largest: float
    """Difference of a log probability"""
    allowed: float
    quantization: str = ""
    """Of the base model, where the answers were recorded or here: a difference is only warned about"""

    @property
    def agrees(self) -> bool:
        return self.largest <= self.allowed

    @property
    def difference(self) -> str:
        """Empty if the answers agree"""
        if self.agrees:
            return ""
        why = "other weights, or another configuration of the adapter"
        if self.quantization:
            why = f"with a base model quantized by {self.quantization[:40]!r}"
        return (
            f"the answers recorded in {RECORD_FILE} are not those of this base model with this adapter: the log "
            f"probability of a token differs by {self.largest:.3g}, and {self.allowed:g} is allowed ({why})"
        )

    @property
    def wrong(self) -> bool:
        """True if the answers are those of another model: a quantized one computes others in any case."""
        return not self.agrees and not self.quantization

    def refusal(self) -> AdapterIncompatible | None:
        """If they are"""
        if not self.wrong:
            return None
        return AdapterIncompatible(
            f"{_as_sentence(self.difference)}. Serve it on the model that it was trained on, or record them again: "
            "`motet adapter record`.",
            reason="ReferenceMismatch",
        )


def read_recorded_answers(folder: Path) -> RecordedAnswers | None:
    """None: the folder has none. Raises AdapterIncompatible, which says what is wrong with them."""
    try:
        with (folder / RECORD_FILE).open("rb") as file:
            raw = file.read(MAX_RECORD_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(raw) > MAX_RECORD_BYTES:
        raise AdapterIncompatible(f"{RECORD_FILE} has more than {MAX_RECORD_BYTES} bytes.", reason="TooLarge")
    try:
        return RecordedAnswers.model_validate(parse(raw, RECORD_FILE))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = repr(".".join(map(str, first["loc"])))[:MAX_WORD_CHARS] if first["loc"] else ""
        what = f"{place}: {first['msg'][:MAX_WORD_CHARS]}" if place else first["msg"][:MAX_WORD_CHARS]
        raise AdapterIncompatible(
            f"{RECORD_FILE} is not as `motet adapter record` writes it: {what}. Record it again, or remove it.",
            reason="FormatRejected",
        ) from None


def other_base(why: str) -> AdapterIncompatible:
    return AdapterIncompatible(
        f"The answers in {RECORD_FILE} were recorded on another base model: {why}. Serve the adapter on the model that "
        "it was trained on, or record them again: `motet adapter record`.",
        reason="ReferenceMismatch",
    )


def _as_sentence(text: str) -> str:
    return text[0].upper() + text[1:]
