"""A prompt that comes back before its answers, with log probabilities where the client asked for them. Pure."""

from collections.abc import Iterator, Sequence

from motet.api.v1 import runner_pb2
from motet.errors import InvalidRequest
from motet_gateway.answers.choice import TokenText
from motet_gateway.parameters import MAX_SCORES, Body, Tokens
from motet_gateway.tokens.detokenizer import detokenizer
from motet_gateway.tokens.text_model import ModelTokenizer


class EchoedPrompt:
    """All choices of a prompt share it. The runner of the first choice gives the log probabilities."""

    __slots__ = ("_logprobs", "_model", "_scored", "_skip", "_tokens", "text")

    def __init__(
        self, tokens: Tokens, text: str, model: ModelTokenizer, *, scored: bool, skip_special_tokens: bool
    ) -> None:
        self.text = text
        self._tokens = tokens
        self._model = model
        self._scored = scored
        self._skip = skip_special_tokens
        self._logprobs: list[runner_pb2.TokenLogprobs] = []

    def score(self, logprobs: Sequence[runner_pb2.TokenLogprobs]) -> None:
        """Of the next tokens, from the second one on."""
        self._logprobs.extend(logprobs)

    @property
    def ready(self) -> bool:
        """Whether all of it can be shown."""
        return not self._scored or len(self._logprobs) == len(self._tokens) - 1

    def scored_tokens(self) -> list[TokenText]:
        """Empty if nobody asked for log probabilities."""
        if not self._scored:
            return []
        logprobs = [runner_pb2.TokenLogprobs(), *self._logprobs]
        return [
            TokenText(token, one, added, scored=place > 0)
            for place, (token, one, added) in enumerate(zip(self._tokens, logprobs, self._added_bytes(), strict=True))
        ]

    def _added_bytes(self) -> Iterator[bytes]:
        """What each token adds to the text."""
        token_bytes = self._model.token_bytes
        text = detokenizer(token_bytes, skip_special_tokens=self._skip)
        begun = False
        for token in self._tokens:
            if text.hides(token):
                yield b""
            elif begun:
                yield token_bytes.of(token)
            else:
                begun = True
                yield text.begins(token)


def echoed_prompts(body: Body, prompts: Sequence[Tokens], model: ModelTokenizer) -> list[EchoedPrompt]:
    skip = body.skip_special_tokens is not False
    scored = body.prompt_logprobs_wanted is not None
    texts = model.decode(prompts, skip_special_tokens=skip)
    return [
        EchoedPrompt(tokens, text, model, scored=scored, skip_special_tokens=skip)
        for tokens, text in zip(prompts, texts, strict=True)
    ]


def check_scores(body: Body, prompts: Sequence[Tokens]) -> None:
    """Refuse what would be too much for one answer. Raises InvalidRequest."""
    alternatives = body.prompt_logprobs_wanted
    if alternatives is None:
        return
    scores = sum(map(len, prompts)) * (1 + alternatives) * body.choices
    if scores > MAX_SCORES:
        raise InvalidRequest(
            f"logprobs: echo would return {scores} log probabilities, and an answer has at most {MAX_SCORES}. Send "
            "fewer or shorter prompts, or lower logprobs or n.",
            param="logprobs",
        )
