"""The text of one choice: tokens in, text out, with stop strings applied and tokens counted. Pure."""

from collections.abc import Callable, Sequence

from motet.api.v1 import runner_pb2
from motet.errors import Internal, MotetError
from motet.reasoning.splitter import ReasoningSplitter
from motet.tool_calls.parser import CallDelta, CallParser, ParsedCall
from motet_gateway.answers.logprobs import LogprobsWriter
from motet_gateway.generation import EndReason
from motet_gateway.tokens.detokenizer import Detokenizer
from motet_gateway.tokens.stop_strings import StopStrings

Score = Callable[[Sequence[runner_pb2.TokenLogprobs]], None]

MAX_UNREAD = 256
"""When this number of tokens of an answer wait because nobody takes it yet, they become text."""
NO_CALL = "The answer has to call a tool but has no call. Its runner may be of a version that knows no tools."


class ChoiceText:
    """The token sink of one choice.

    Tokens become text when the text is taken, many at once. Where their text may end the answer, each is decoded
    immediately: what comes behind that end is not counted.
    """

    __slots__ = (
        "_begun",
        "_detokenizer",
        "_hidden_ids",
        "_ids",
        "_last_token",
        "_min_tokens",
        "_must_call",
        "_parser",
        "_reasoning",
        "_reasoning_tokens",
        "_splitter",
        "_stop_ids",
        "_stops",
        "_unread",
        "changed",
        "error",
        "finish",
        "index",
        "logprobs",
        "on_placed",
        "ready",
        "score",
        "stop_here",
        "tokens",
        "waiting_for",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: StopStrings | None,
        *,
        hidden_ids: frozenset[int],
        stop_ids: frozenset[int] = frozenset(),
        keeps_ids: bool = False,
        min_tokens: int,
        logprobs: LogprobsWriter | None,
        splitter: ReasoningSplitter | None = None,
        parser: CallParser | None = None,
        must_call: bool = False,
        on_placed: Callable[[], None],
        changed: Callable[["ChoiceText"], None],
        stop_here: Callable[[], None],
        score: Score,
    ) -> None:
        """`stop_ids`: tokens that the client named. `keeps_ids`: it wants all tokens by their ids. `splitter`: if the
        model may reason. `parser`: of calls, if the request offers tools. `score` gets the log probabilities of the
        prompt."""
        self.index = index
        self._splitter = splitter
        self._reasoning: list[str] = []
        self._reasoning_tokens = 0
        self._parser = parser
        self._must_call = must_call
        self._detokenizer = detokenizer
        self._stops = stops
        self._hidden_ids = hidden_ids  # a stop token ends the answer and is not part of its text
        self._stop_ids = stop_ids
        self._last_token = -1
        self._ids: list[int] | None = [] if keeps_ids else None
        self._min_tokens = min_tokens
        self.logprobs = logprobs
        """Set when the client asked for them."""
        self._begun = False
        self.on_placed = on_placed
        self.changed = changed
        self.stop_here = stop_here
        self.score = score
        self._unread: list[int] = []
        self.ready: list[str] = []
        self.tokens = 0
        self.finish: EndReason | None = None
        self.error: MotetError | None = None
        self.waiting_for = ""

    @property
    def finish_reason(self) -> str | None:
        """In the words of the client."""
        called = self._parser is not None and self._parser.complete
        return "tool_calls" if called and self.finish is EndReason.STOP else self.finish

    @property
    def stop_string(self) -> str | None:
        """That has ended the answer."""
        return self._stops.found if self._stops is not None else None

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or the stop token that has ended the answer, as vLLM says it."""
        if self.finish is not EndReason.STOP:
            return None
        by_token = self._last_token if self._last_token in self._stop_ids else None
        return by_token if self.stop_string is None else self.stop_string

    @property
    def calls(self) -> Sequence[ParsedCall]:
        return self._parser.calls if self._parser is not None else ()

    @property
    def reasoning_tokens(self) -> int | None:
        """Those of `tokens` that are reasoning, with its tags. None: its model is not known to reason."""
        if self._splitter is None:
            return None
        return self._reasoning_tokens if self._splitter.found else 0

    @property
    def over(self) -> bool:
        return self.finish is not None or self.error is not None

    def placed(self) -> None:
        self.waiting_for = ""
        self.on_placed()

    def waiting(self, for_what: str) -> None:
        self.waiting_for = for_what

    def deliver(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        self.waiting_for = ""
        if self._has_ended():
            return
        if self._stops is None and self._parser is None and not self._reasons:
            self.tokens += len(tokens)
            self._unread.extend(tokens)
            if len(self._unread) >= MAX_UNREAD:
                self._read()
        else:
            tokens = self._read_until_end(tokens)
        if tokens and self._stop_ids:
            self._last_token = tokens[-1]
        if self._ids is not None:
            self._ids.extend(tokens)
        if (writer := self.logprobs) is not None:
            for token, one in zip(tokens, logprobs, strict=False):
                writer.add(token, one, self._added_by(token, writer))
        if self._has_ended():
            self.stop_here()
        else:
            self.changed(self)

    @property
    def _reasons(self) -> bool:
        return self._splitter is not None and not self._splitter.over

    def _has_ended(self) -> bool:
        """By its own text: a stop string, or the last call that it may have."""
        stopped = self._stops is not None and self._stops.stopped
        return stopped or (self._parser is not None and self._parser.enough)

    def _read_until_end(self, tokens: Sequence[int]) -> Sequence[int]:
        """Decode tokens one by one. Returns those that belong to the answer."""
        for position, token in enumerate(tokens, start=1):
            self.tokens += 1
            self._reasoning_tokens += self._reasons
            text = self._content([token])
            if self._stops is not None and self.tokens > self._min_tokens:
                text = self._stops.feed(text)
            if text:
                self.ready.append(text)
            if self._has_ended():
                return tokens[:position]
        return tokens

    def _added_by(self, token: int, writer: LogprobsWriter) -> bytes:
        if token in self._hidden_ids or self._detokenizer.hides(token):
            return b""
        if not self._begun:
            self._begun = True
            return self._detokenizer.begins(token)
        return writer.token_bytes.of(token)

    def _content(self, tokens: list[int]) -> str:
        """The text that belongs to no reasoning and no call: stop strings end only that."""
        text = self._text(tokens)
        if self._splitter is not None:
            text = self._without_reasoning(self._splitter.feed(text))
        return text if self._parser is None else self._parser.feed(text)

    def _rest_of_content(self) -> str:
        text = self._detokenizer.flush()
        if self._splitter is not None:
            text = self._without_reasoning(self._splitter.feed(text))
            text += self._without_reasoning(self._splitter.flush())
        return text if self._parser is None else self._parser.feed(text) + self._parser.flush()

    def _without_reasoning(self, parts: tuple[str, str]) -> str:
        reasoning, content = parts
        if reasoning:
            self._reasoning.append(reasoning)
        return content

    def _text(self, tokens: list[int]) -> str:
        visible = [token for token in tokens if token not in self._hidden_ids] if self._hidden_ids else tokens
        return self._detokenizer.feed(visible) if visible else ""

    def end(self, how: EndReason | MotetError) -> None:
        try:
            if isinstance(how, MotetError):
                self.error = how
            else:
                finish = self._flush_text(how)
                if self._must_call and finish is EndReason.STOP and not self.calls:
                    self.error = Internal(NO_CALL)
                else:
                    self.finish = finish
        except Exception:
            self.error = Internal("The gateway failed at the end of this answer; its log says why.")
            raise
        finally:  # otherwise the client would wait until its deadline
            self.changed(self)

    def _flush_text(self, how: EndReason) -> EndReason:
        """Release the text that was held back. It may complete a stop string."""
        if self._stops is None:
            self._read()
            self.ready.append(self._rest_of_content())
            return how
        if not self._stops.stopped:
            self.ready.append(self._stops.feed(self._rest_of_content()))
            if not self._stops.stopped:
                self.ready.append(self._stops.flush())
                return how
        return EndReason.STOP

    def take(self) -> str:
        """The text that has not been taken yet."""
        if self._unread:
            self._read()
        ready, self.ready = self.ready, []
        return ready[0] if len(ready) == 1 else "".join(ready)

    def take_reasoning(self) -> str:
        """What is new of it. Take the text first."""
        taken, self._reasoning = self._reasoning, []
        return "".join(taken)

    def take_ids(self) -> list[int]:
        """Of tokens that have not been taken yet, if their ids are kept."""
        if self._ids is None:
            return []
        taken, self._ids = self._ids, []
        return taken

    def take_calls(self) -> Sequence[CallDelta]:
        """What is new of its calls."""
        return self._parser.take() if self._parser is not None else ()

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        self.ready.append(self._content(unread))
