"""Log probabilities of a prompt in vLLM's form. Pure."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import orjson

from motet.api.v1 import runner_pb2
from motet_gateway.answers.logprobs import MIN_LOGPROB
from motet_gateway.parameters import Tokens
from motet_gateway.tokens.token_bytes import TokenBytes, readable


class ScoredPrompt:
    """All choices of a prompt share it. The runner of the first choice scores it."""

    __slots__ = ("_scores", "_token_bytes", "_tokens", "_top", "json")

    def __init__(self, tokens: Tokens, token_bytes: TokenBytes, top: int) -> None:
        """`top`: how many alternatives to show."""
        self._tokens = tokens
        self._token_bytes = token_bytes
        self._top = top
        self._scores: deque[runner_pb2.TokenLogprobs] = deque()
        self.json = bytearray()
        """Set by `encode`."""

    def score(self, logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        """Of the next tokens, from the second one on."""
        self._scores.extend(logprobs)

    @property
    def complete(self) -> bool:
        """Whether all log probabilities have come, and `encode` has something to do."""
        return not self.json and len(self._scores) == len(self._tokens) - 1

    def encode(self) -> None:
        """Write them as JSON, token by token: one long call would keep all other threads waiting, and objects of all
        tokens would take several times the memory of the text. This may take a while."""
        json = bytearray(b"[null")
        for token in self._tokens[1:]:
            json += b","
            json += orjson.dumps(self._of_token(token, self._scores.popleft()))
        json += b"]"
        self.json = json

    def _of_token(self, token: int, one: runner_pb2.TokenLogprobs) -> dict[str, Any]:
        """The token itself comes first, as many clients expect."""
        tops = list(zip(one.top_ids[: self._top], one.top_logprobs[: self._top], strict=False))
        shown = {str(token): self._entry(token, one.logprob, one.rank or None)}
        return shown | {str(other): self._entry(other, value, at) for at, (other, value) in enumerate(tops, start=1)}

    def _entry(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = readable(self._token_bytes.all[token])
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}
