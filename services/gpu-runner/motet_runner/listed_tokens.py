"""The rules of lists of tokens: which ones an answer may have, and which it has nowhere in a row. No torch."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from motet.errors import InvalidRequest, MotetError
from motet_runner.interface import Sampling
from motet_runner.row_mask import TokenRules


class ListedTokens:
    """Beside the rules of a grammar, if there are any."""

    def __init__(
        self, sampling: Sampling, vocabulary: int, delivered: Sequence[int], grammar: TokenRules | None = None
    ) -> None:
        self._grammar = grammar
        self._bytes = (vocabulary + 7) // 8
        self._allowed = sampling.allowed_token_ids
        self._never = {word[0] for word in sampling.bad_words if len(word) == 1}
        bits = _bits(self._allowed) if self._allowed else (1 << vocabulary) - 1
        self._bits = bits & ~_bits(self._never)
        self._endings: dict[int, list[list[int]]] = defaultdict(list)
        """By the last token of each bad word: the tokens before it"""
        for word in sampling.bad_words:
            if len(word) > 1:
                self._endings[word[-1]].append(list(word[:-1]))
        self._taken = list(delivered)
        self._chooses_again = False

    def back_to(self, place: int) -> None:
        del self._taken[place:]
        if self._grammar is not None:
            self._grammar.back_to(place)

    def take(self, token: int, place: int) -> bool:
        self.back_to(place)
        listed = not self._allowed or token in self._allowed
        taken = listed and token not in self._never and not self._ends_a_word(token)
        if taken and self._grammar is not None:
            taken = self._grammar.take(token, place)
        if taken:
            self._taken.append(token)
            self._chooses_again = False
        return taken

    def allowed(self) -> bytes:
        self._chooses_again = True
        bits = self._bits & ~_bits(filter(self._ends_a_word, self._endings))
        if self._grammar is not None:
            bits &= int.from_bytes(self._grammar.allowed(), "little")
        return bits.to_bytes(self._bytes, "little")

    @property
    def failure(self) -> MotetError | None:
        if not self._chooses_again:
            return None
        if self._grammar is not None and (failure := self._grammar.failure) is not None:
            return failure
        return InvalidRequest(
            "The answer cannot go on: allowed_token_ids, bad_words and the request's other options leave no token.",
            param="allowed_token_ids",
        )

    def _ends_a_word(self, token: int) -> bool:
        taken = self._taken
        if not taken or (words := self._endings.get(token)) is None:
            return False
        last = taken[-1]  # most words differ there: the rest of the answer is not copied for them
        return any(word[-1] == last and taken[-len(word) :] == word for word in words)


def _bits(tokens: Iterable[int]) -> int:
    written = bytearray()
    for token in tokens:
        place, bit = divmod(token, 8)
        if place >= len(written):
            written.extend(bytes(place + 1 - len(written)))
        written[place] |= 1 << bit
    return int.from_bytes(written, "little")
