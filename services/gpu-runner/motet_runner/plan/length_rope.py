"""Rope types whose frequencies depend on a length: `dynamic` and `longrope`.

Transformers takes the longest position of a call. Here each sequence has its own length, as if it were alone: one long
request changes no other answer. That length depends on the request alone, never on the cuts of its prompt, on where it
was parked, or on the runner. So the same sequence always has the same keys.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LengthRope:
    original: int
    """The length of the model's training context. Up to here, all frequencies are the original ones."""
    grows: bool
    """True if the frequencies change with each token beyond it (`dynamic`): a prompt's keys then have the frequencies
    of the whole prompt, and each later key those of the tokens up to itself. If False, there is one other set
    (`longrope`), for all keys of a longer sequence."""

    def salt(self, prompt_tokens: int, tokens: int) -> bytes:
        """Sequences share the pages of equal tokens only if this is equal. It is appended to their other salt."""
        if self.grows:
            return b"" if prompt_tokens <= self.original else f" prompt of {prompt_tokens}".encode()
        return b"" if tokens <= self.original else b" long"

    def restarts_after(self, tokens: int) -> int | None:
        """The most tokens of a sequence before all its keys must be computed again; None: that never happens."""
        return None if self.grows or tokens > self.original else self.original
