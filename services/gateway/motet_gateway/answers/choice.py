"""One choice as text: tokens in, text out, stop strings applied, everything counted. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from motet.api.v1 import runner_pb2
from motet.errors import MotetError
from motet_gateway.generation import End
from motet_gateway.tokens.detokenizer import Detokenizer
from motet_gateway.tokens.stops import StopStrings


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token with its probability, for clients that asked for logprobs."""

    token: int
    logprobs: runner_pb2.TokenLogprobs


class ChoiceText:
    """A sink for one generation. `pending` is what the client has not been sent yet."""

    __slots__ = (
        "_detokenizer", "_min_tokens", "_silent_ids", "_stopped", "_stops", "_want_logprobs", "changed", "error",
        "finish", "index", "logprobs", "on_placed", "pending", "stop_here", "tokens", "waiting_for",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: StopStrings,
        *,
        silent_ids: frozenset[int],
        min_tokens: int,
        want_logprobs: bool,
        on_placed: Callable[[], None],
        changed: Callable[["ChoiceText"], None],
        stop_here: Callable[[], None],
    ) -> None:
        self.index = index
        self._detokenizer = detokenizer
        self._stops = stops
        self._silent_ids = silent_ids  # a stop token ends the answer and is no part of its text
        self._min_tokens = min_tokens
        self._want_logprobs = want_logprobs
        self.on_placed = on_placed
        self.changed = changed
        self.stop_here = stop_here
        self.pending = ""
        self.tokens = 0
        self.logprobs: list[TokenText] = []
        self.finish: End | None = None
        self.error: MotetError | None = None
        self.waiting_for = ""
        self._stopped = False

    @property
    def over(self) -> bool:
        return self.finish is not None or self.error is not None

    def placed(self) -> None:
        self.waiting_for = ""
        self.on_placed()

    def waits(self, for_what: str) -> None:
        self.waiting_for = for_what

    def deliver(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        if self._stopped:
            return
        self.waiting_for = ""
        for position, token in enumerate(tokens):
            self.tokens += 1
            if self._want_logprobs and position < len(logprobs):
                self.logprobs.append(TokenText(token, logprobs[position]))
            if token in self._silent_ids:
                continue
            text = self._detokenizer.feed(token)
            if self.tokens > self._min_tokens:
                text = self._stops.feed(text)
                if self._stops.stopped:
                    self.pending += text
                    self._stopped = True
                    self.stop_here()
                    return
            self.pending += text
        self.changed(self)

    def conclude(self, how: End | MotetError) -> None:
        if isinstance(how, MotetError):
            self.error = how
        else:
            if not self._stopped:
                # The end may free what was held back, and even complete a stop string.
                tail = self._stops.feed(self._detokenizer.flush())
                self.pending += tail if self._stops.stopped else tail + self._stops.flush()
            self.finish = End.STOP if self._stops.stopped else how
        self.changed(self)

    def take(self) -> str:
        text, self.pending = self.pending, ""
        return text

    def take_logprobs(self) -> list[TokenText]:
        taken, self.logprobs = self.logprobs, []
        return taken
