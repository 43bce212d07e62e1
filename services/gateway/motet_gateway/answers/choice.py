"""The text of one choice: tokens in, text out, with stop strings applied and tokens counted. Pure."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from motet.api.v1 import runner_pb2
from motet.errors import Internal, MotetError
from motet.reasoning.splitter import ReasoningSplitter
from motet.tool_calls.parser import CallDelta, CallParser, ParsedCall
from motet_gateway.answers.logprobs import Columns, LogprobsWriter
from motet_gateway.answers.parts import Part, Reasoning, Scores, joined
from motet_gateway.generation import EndReason
from motet_gateway.tokens.detokenizer import Detokenizer
from motet_gateway.tokens.stop_strings import StopStrings

Score = Callable[[Sequence[runner_pb2.TokenLogprobs]], None]

MAX_UNREAD = 256
"""When this number of tokens of an answer wait because nobody takes it yet, they become text."""
MAX_WAITING = 4096
"""The most log probabilities that wait apart from each other: each takes some 500 bytes more than is counted. Those of
more tokens go where the last of them goes."""
NO_CALL = "The answer has to call a tool but has no call. Its runner may be of a version that knows no tools."


class _Scored(NamedTuple):
    """The log probabilities of a token, and of which characters it has bytes. One without any goes with the next."""

    begins: int
    ends: int
    columns: Columns


class ChoiceText:
    """The token sink of one choice.

    Tokens become text when the text is taken, many at once. Where their text may end the answer, each is decoded
    immediately: what comes behind that end is not counted.
    """

    __slots__ = (
        "_begun",
        "_begun_calls",
        "_characters",
        "_detokenizer",
        "_divides",
        "_hidden_ids",
        "_ids",
        "_kind",
        "_last_token",
        "_min_tokens",
        "_must_call",
        "_parser",
        "_ready",
        "_reasoning_tokens",
        "_run",
        "_splitter",
        "_stop_ids",
        "_stops",
        "_unread",
        "_waiting",
        "changed",
        "error",
        "finish",
        "index",
        "logprobs",
        "on_placed",
        "over",
        "plain",
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
        self._reasoning_tokens = 0
        self._parser = parser
        self._must_call = must_call
        self._detokenizer = detokenizer
        self._stops = stops
        self.plain = stops is None and parser is None and splitter is None and logprobs is None
        """Nothing in its text ends it, and only the text is wanted: the frequent case."""
        self._hidden_ids = hidden_ids  # a stop token ends the answer and is not part of its text
        self._stop_ids = stop_ids
        self._last_token = -1
        self._ids: list[int] | None = [] if keeps_ids else None
        self._min_tokens = min_tokens
        self.logprobs = logprobs
        """Set when the client asked for them."""
        self._divides = logprobs is not None and (parser is not None or splitter is not None)
        """Whether log probabilities are of parts of several kinds."""
        self._begun = False
        self.on_placed = on_placed
        self.changed = changed
        self.stop_here = stop_here
        self.score = score
        self._unread: list[int] = []
        self._ready: list[Part] = []
        self._characters = 0
        """That its tokens have written."""
        self._waiting: deque[_Scored] = deque()
        """Until it is decided what their characters are."""
        self._run: Scores | None = None
        """The last ones of what is ready."""
        self._kind: type = str
        """Of the last part."""
        self._begun_calls = 0
        self.tokens = 0
        self.finish: EndReason | None = None
        self.error: MotetError | None = None
        self.over = False
        self.waiting_for = ""

    @property
    def finish_reason(self) -> str | None:
        """In the words of the client."""
        called = bool(self.calls) and all(call.complete for call in self.calls)
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
        return self._parser.calls[: self._begun_calls] if self._parser is not None else ()

    @property
    def reasoning_tokens(self) -> int | None:
        """Those of `tokens` that are reasoning, with its tags. None: nobody looks for it, as the model is not known to
        reason or the client wants it undivided."""
        if self._splitter is None:
            return None
        return self._reasoning_tokens if self._splitter.found else 0

    def placed(self) -> None:
        self.waiting_for = ""
        self.on_placed()

    def waiting(self, for_what: str) -> None:
        self.waiting_for = for_what

    def deliver(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        self.waiting_for = ""
        if self.plain:
            self._add_unread(tokens)
        elif self._has_ended():
            return
        elif self._stops is None and self._parser is None and not self.reasons and not self._divides:
            self._write_scores(tokens, logprobs)
            self._add_unread(tokens)
        else:
            tokens = self._read_until_end(tokens, logprobs)
        if tokens and self._stop_ids:
            self._last_token = tokens[-1]
        if self._ids is not None:
            self._ids.extend(tokens)
        if not self.plain and self._has_ended():
            self.stop_here()
        else:
            self.changed(self)

    def _add_unread(self, tokens: Sequence[int]) -> None:
        self.tokens += len(tokens)
        self._unread.extend(tokens)
        if len(self._unread) >= MAX_UNREAD:
            self._read()

    @property
    def reasons(self) -> bool:
        """Whether what comes may be reasoning."""
        return self._splitter is not None and not self._splitter.over

    def _has_ended(self) -> bool:
        """By its own text: a stop string, or the last call that it may have."""
        stopped = self._stops is not None and self._stops.stopped
        return stopped or (self._parser is not None and self._parser.enough)

    def _read_until_end(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> Sequence[int]:
        """Decode tokens one by one. Returns those that belong to the answer."""
        for position, token in enumerate(tokens, start=1):
            self.tokens += 1
            self._reasoning_tokens += self.reasons
            text = self._text([token])
            self._write_scores([token], logprobs[position - 1 : position])
            if self._divides:
                self._keep_scores(text)
            self._say(text, stops=self.tokens > self._min_tokens)
            if self._has_ended():
                return tokens[:position]
        return tokens

    def _write_scores(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        if (writer := self.logprobs) is not None:
            for token, one in zip(tokens, logprobs, strict=False):
                writer.add(token, one, self._added_by(token, writer))

    def _added_by(self, token: int, writer: LogprobsWriter) -> bytes:
        if token in self._hidden_ids or self._detokenizer.hides(token):
            return b""
        if not self._begun:
            self._begun = True
            return self._detokenizer.begins(token)
        return writer.token_bytes.of(token)

    def _parts(self, text: str, *, last: bool) -> Iterator[tuple[str | Reasoning | CallDelta, int]]:
        """Each with how many characters have come behind it."""
        if self._splitter is not None:
            thought, text = self._splitter.feed(text)
            if last:
                more, rest = self._splitter.flush()
                thought, text = thought + more, text + rest
            if thought:
                yield Reasoning(thought), len(text)
        if (parser := self._parser) is not None:
            found = parser.feed(text)
            yield from zip(found, parser.behind, strict=True)
            if last:
                found = parser.flush()
                yield from zip(found, parser.behind, strict=True)
        elif text:
            yield text, 0

    def _say(self, text: str, *, stops: bool, last: bool = False) -> None:
        """`stops`: whether stop strings may end the answer. They end texts alone, and none goes on behind a call."""
        self._characters += len(text)
        for part, behind in self._parts(text, last=last):
            if self._divides:
                self._divide_scores(part, self._characters - behind)
            said = part
            if stops and self._stops is not None:
                if isinstance(part, str):
                    said = self._stops.feed(part)
                elif held := self._stops.flush():
                    self._ready.append(held)
            if said:
                self._ready.append(said)
            if isinstance(said, CallDelta) and said.id:
                self._begun_calls += 1
            if self._stops is not None and self._stops.stopped:
                return

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
            self.over = True
            self.changed(self)

    def _flush_text(self, how: EndReason) -> EndReason:
        """Release the text that was held back. It may complete a stop string."""
        if self._unread:
            self._read()
        if self._stops is not None and self._stops.stopped:
            return EndReason.STOP
        self._say(self._detokenizer.flush(), stops=True, last=True)
        if self._stops is not None and not self._stops.stopped and (held := self._stops.flush()):
            self._ready.append(held)
        return EndReason.STOP if self._has_ended() else how  # its last token may be the last that it may have

    def take(self) -> list[Part]:
        """What has not been taken yet."""
        if self._unread:
            self._read()
        if self._divides:
            if self.over:
                self._move_scores(self._characters, of_text=False)
                self._move_scores(self._characters + 1, of_text=self._kind is str)
        elif self.logprobs is not None and (scores := self.logprobs.take()):
            self._ready.insert(0, Scores(scores, of_text=True))
        self._run = None
        ready, self._ready = self._ready, []
        return joined(ready) if len(ready) > 1 else ready

    def take_ids(self) -> list[int]:
        """Of tokens that have not been taken yet, if their ids are kept."""
        if self._ids is None:
            return []
        taken, self._ids = self._ids, []
        return taken

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        text = self._text(unread)
        if self._splitter is not None:
            self._say(text, stops=False)
        elif text:
            self._ready.append(text)

    def _keep_scores(self, text: str) -> None:
        """Of the token that has written this."""
        writer, waiting = self.logprobs, self._waiting
        assert writer is not None
        if not (columns := writer.take()):
            return
        begins = self._characters
        ends = begins + max(len(text) + self._detokenizer.incomplete, 1)
        if len(waiting) == MAX_WAITING:
            begins, _, more = waiting.pop()
            writer.join(more, columns)
            columns = more
        waiting.append(_Scored(begins, ends, columns))

    def _divide_scores(self, part: str | Reasoning | CallDelta, ends: int) -> None:
        """The part gets those of its own tokens. A token that writes a character of a text is the text's."""
        self._kind = type(part)
        if isinstance(part, str):
            self._move_scores(ends - len(part), of_text=False)
            self._move_scores(ends, of_text=True)
        else:
            if self._run is not None and self._run.of_text:
                self._run = None  # the text behind this part is another one
            self._move_scores(ends, of_text=False)

    def _move_scores(self, to: int, *, of_text: bool) -> None:
        """Of all tokens that have ended there; of a text: that have begun before."""
        writer, waiting = self.logprobs, self._waiting
        assert writer is not None
        while waiting and (waiting[0].begins < to if of_text else waiting[0].ends <= to):
            if self._run is None or self._run.of_text is not of_text:
                self._run = Scores({}, of_text)
                self._ready.append(self._run)
            writer.join(self._run.columns, waiting.popleft().columns)
