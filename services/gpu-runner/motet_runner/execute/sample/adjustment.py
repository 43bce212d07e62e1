"""How one row's options change its logits: penalties, bias, and EOS tokens that come too early. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from motet_runner.interface import Sampling


@dataclass(slots=True)
class Adjustment:
    """Follows the tokens of a row. The time of a step does not grow with the number of tokens."""

    sampling: Sampling
    prompt_tokens: int
    ends: frozenset[int]
    """Tokens that must not come before `min_tokens`."""
    _counted: int = 0
    _times: Counter[int] = field(default_factory=Counter)
    """Token → how often it is in the output"""
    _forbids_ends: bool = False

    @staticmethod
    def wanted(sampling: Sampling, output_tokens: int) -> bool:
        penalised = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        return bool(penalised or sampling.logit_bias or output_tokens < sampling.min_tokens)

    def follow(self, tokens: Sequence[int]) -> tuple[dict[int, float], Sequence[int]]:
        """→ token → the total to add to its logit, for tokens whose total may have changed since the last call; and the
        row's new tokens.

        Presence and frequency penalties count the output, as OpenAI specifies.
        """
        began, new = self._counted, tokens[self._counted :]
        output = tokens[max(began, self.prompt_tokens) :]
        self._counted = len(tokens)
        changed = set[int]()
        if self.sampling.presence_penalty or self.sampling.frequency_penalty:
            self._times.update(output)
            changed.update(output)
        forbids_ends = len(tokens) - self.prompt_tokens < self.sampling.min_tokens
        if forbids_ends != self._forbids_ends:
            self._forbids_ends = forbids_ends
            changed |= self.ends
        if not began:
            changed |= self.sampling.logit_bias.keys()
        return {token: self._added(token) for token in changed}, new

    def _added(self, token: int) -> float:
        if self._forbids_ends and token in self.ends:
            return float("-inf")
        added = self.sampling.logit_bias.get(token, 0.0)
        if times := self._times.get(token):
            added -= self.sampling.presence_penalty + times * self.sampling.frequency_penalty
        return added
