"""Rope types whose frequencies depend on a length: `dynamic` and `longrope`.

Transformers takes the longest position of a call. Here each sequence has its own length, as if it were alone: one long
request changes nobody else's answer. That length depends on the request alone, never on how its prompt is cut in parts,
on where it was parked, or on the runner. So the same sequence always has the same keys.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthRope:
    original: int
    """Tokens of the context that the model was trained with. Up to here, all frequencies are the original ones."""
    grows: bool
    """Whether they change with each token beyond it (`dynamic`): the keys of a prompt then have the frequencies of the
    whole prompt, and each later key those of the tokens up to itself. If not, there is one other set (`longrope`), and
    all keys of a longer sequence have it."""

    def salt(self, prompt_tokens: int, tokens: int) -> bytes:
        """What sequences must have in common to share the pages of equal tokens. It follows their other salt."""
        if self.grows:
            return b"" if prompt_tokens <= self.original else f" prompt of {prompt_tokens}".encode()
        return b"" if tokens <= self.original else b" long"

    def restarts_after(self, tokens: int) -> int | None:
        """How many tokens a sequence has at most before all its keys must be computed again; None: that never
        happens."""
        return None if self.grows or tokens > self.original else self.original
