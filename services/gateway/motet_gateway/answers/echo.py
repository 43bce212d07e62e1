"""A prompt that comes back before its answers, with log probabilities where the client asked for them. Pure."""

from collections.abc import Callable, Iterator, Sequence

from motet.api.v1 import runner_pb2
from motet_gateway.answers.logprobs import CharacterCounter, Columns, CompletionLogprobs
from motet_gateway.parameters import Body, Tokens
from motet_gateway.tokens.detokenizer import detokenizer
from motet_gateway.tokens.text_model import ModelTokenizer


class EchoedPrompt:
    """All choices of a prompt share it. The runner of the first choice gives the log probabilities."""

    __slots__ = ("_logprobs", "_scored", "_tokens", "_writer", "added", "characters", "logprobs", "text")

    def __init__(
        self,
        tokens: Tokens,
        text: str,
        added: Sequence[bytes],
        writer: CompletionLogprobs | None,
        characters: CharacterCounter,
    ) -> None:
        """`added`: what each token adds to the text. `writer`: None if nobody asked for log probabilities."""
        self.text = text
        self._tokens = tokens
        self.added = added
        self._writer = writer
        self._logprobs: list[runner_pb2.TokenLogprobs] = []
        self.logprobs: Columns = {}
        """Set by `encode`."""
        self.characters = characters
        """Of the whole prompt."""
        self.characters.before(b"".join(added))

    def score(self, logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        """Of the next tokens, from the second one on."""
        if self._writer is not None:
            self._logprobs.extend(logprobs)

    @property
    def ready(self) -> bool:
        """Whether all of it can be shown."""
        return self._writer is None or bool(self.logprobs)

    @property
    def complete(self) -> bool:
        """Whether all log probabilities have come, and `encode` has something to do."""
        return not self.ready and len(self._logprobs) == len(self._tokens) - 1

    def encode(self) -> None:
        """Write the log probabilities as JSON. This may take a while."""
        assert self._writer is not None
        scores = [runner_pb2.TokenLogprobs(), *self._logprobs]
        for place, (token, one, added) in enumerate(zip(self._tokens, scores, self.added, strict=True)):
            self._writer.add(token, one, added, scored=place > 0)
        self.logprobs = self._writer.take()
        self._logprobs.clear()


def echoed_prompts(
    body: Body, prompts: Sequence[Tokens], model: ModelTokenizer, *, writer: Callable[[], CompletionLogprobs]
) -> list[EchoedPrompt]:
    skip = body.skip_special_tokens is not False
    scored = body.top_logprobs_wanted is not None
    return [
        EchoedPrompt(
            tokens,
            text,
            list(_added_bytes(tokens, model, skip=skip)) if scored else (),
            writer() if scored else None,
            CharacterCounter(model.token_bytes),
        )
        for tokens, text in zip(prompts, model.decode(prompts, skip_special_tokens=skip), strict=True)
    ]


def _added_bytes(tokens: Tokens, model: ModelTokenizer, *, skip: bool) -> Iterator[bytes]:
    """What each token adds to the text."""
    text = detokenizer(model.token_bytes, skip_special_tokens=skip)
    begun = False
    for token in tokens:
        if text.hides(token):
            yield b""
        elif begun:
            yield model.token_bytes.of(token)
        else:
            begun = True
            yield text.begins(token)
