"""The text of one choice: tokens in, text out, with stop strings applied and tokens counted. Pure."""

from collections.abc import Callable, Sequence

from motet.api.v1 import runner_pb2
from motet.errors import Internal, MotetError
from motet.reasoning.splitter import ReasoningSplitter
from motet.tool_calls.parser import CallDelta, CallParser, ParsedCall
from motet_gateway.answers.logprobs import LogprobsWriter
from motet_gateway.answers.parts import Part, Reasoning, joined
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
        "_begun_calls",
        "_detokenizer",
        "_hidden_ids",
        "_ids",
        "_kind",
        "_last_token",
        "_min_tokens",
        "_must_call",
        "_parser",
        "_plain",
        "_ready",
        "_reasoning_tokens",
        "_run_at",
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
        self._plain = stops is None and parser is None and splitter is None and logprobs is None
        """Nothing in its text ends it, and only the text is wanted: the frequent case."""
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
        self._ready: list[Part] = []
        self._kind: type = str
        """Of the last part."""
        self._run_at = 0
        """Where in what is ready the parts of that kind begin: there their log probabilities stand."""
        self._begun_calls = 0
        self.tokens = 0
        self.finish: EndReason | None = None
        self.error: MotetError | None = None
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
        if self._plain:
            self._add_unread(tokens)
        elif self._has_ended():
            return
        elif self._stops is None and self._parser is None and not self._reasons and not self._divides:
            self._write_scores(tokens, logprobs)
            self._add_unread(tokens)
        else:
            tokens = self._read_until_end(tokens, logprobs)
        if tokens and self._stop_ids:
            self._last_token = tokens[-1]
        if self._ids is not None:
            self._ids.extend(tokens)
        if not self._plain and self._has_ended():
            self.stop_here()
        else:
            self.changed(self)

    def _add_unread(self, tokens: Sequence[int]) -> None:
        self.tokens += len(tokens)
        self._unread.extend(tokens)
        if len(self._unread) >= MAX_UNREAD:
            self._read()

    @property
    def _reasons(self) -> bool:
        return self._splitter is not None and not self._splitter.over

    def _has_ended(self) -> bool:
        """By its own text: a stop string, or the last call that it may have."""
        stopped = self._stops is not None and self._stops.stopped
        return stopped or (self._parser is not None and self._parser.enough)

    def _read_until_end(self, tokens: Sequence[int], logprobs: Sequence[runner_pb2.TokenLogprobs]) -> Sequence[int]:
        """Decode tokens one by one. Returns those that belong to the answer."""
        for position, token in enumerate(tokens, start=1):
            self.tokens += 1
            reasoned = self._reasons
            self._reasoning_tokens += reasoned
            before = len(self._ready)
            self._say(self._parts(self._text([token])), stops=self.tokens > self._min_tokens)
            said = len(self._ready) > before
            if said and self._divides:
                self._divide_scores(before)
            self._write_scores([token], logprobs[position - 1 : position])
            if self.logprobs is not None and (said or reasoned > self._reasons):
                self.logprobs.mark()
            if self._has_ended():
                return tokens[:position]
        return tokens

    @property
    def _divides(self) -> bool:
        """Whether log probabilities are of parts of several kinds."""
        return self.logprobs is not None and (self._parser is not None or self._splitter is not None)

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

    def _parts(self, text: str, *, last: bool = False) -> list[Part]:
        parts: list[Part] = []
        if self._splitter is not None:
            thought, text = self._splitter.feed(text)
            if last:
                more, rest = self._splitter.flush()
                thought, text = thought + more, text + rest
            if thought:
                parts.append(Reasoning(thought))
        if self._parser is not None:
            parts += self._parser.feed(text)
            parts += self._parser.flush() if last else ()
        elif text:
            parts.append(text)
        return parts

    def _say(self, parts: Sequence[Part], *, stops: bool) -> None:
        """`stops`: whether stop strings may end the answer. They end texts alone, and none goes on behind a call."""
        for part in parts:
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
            self.changed(self)

    def _flush_text(self, how: EndReason) -> EndReason:
        """Release the text that was held back. It may complete a stop string."""
        if self._unread:
            self._read()
        if self._stops is not None and self._stops.stopped:
            return EndReason.STOP
        before = len(self._ready)
        self._say(self._parts(self._detokenizer.flush(), last=True), stops=True)
        if self._stops is not None:
            if self._stops.stopped:
                how = EndReason.STOP
            elif held := self._stops.flush():
                self._ready.append(held)
        if self._divides and len(self._ready) > before:
            self._divide_scores(before)
        return how

    def take(self) -> list[Part]:
        """What has not been taken yet."""
        if self._unread:
            self._read()
        if self.logprobs is not None and (scores := self.logprobs.take(marked=self._divides and not self.over)):
            self._ready.insert(self._run_at, scores)
        self._run_at = 0
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
            self._ready += self._parts(text)
        elif text:
            self._ready.append(text)

    def _divide_scores(self, before: int) -> None:
        """If parts of another kind have begun there, those before get the log probabilities of their own tokens. A text
        gets those of its tokens alone: a tag, and what waited for a decision behind a call, go with what is no text.
        What waited behind reasoning goes with what follows."""
        writer, kind = self.logprobs, self._kind
        assert writer is not None
        new = [type(part) for part in self._ready[before:]]
        if new[-1] is kind:
            return
        self._kind = new[-1]
        begins = before + next(at for at, one in enumerate(new) if one is not kind)
        if scores := writer.take(marked=kind is not CallDelta):
            self._ready.insert(self._run_at, scores)
            begins += 1
        self._run_at = begins
