"""What a runner's own measurements say of its iterations (PU-13). Pure."""

from math import inf

from motet.value import value


@value()
class StepProfile:
    """Seconds."""

    fixed: float = 0.0
    """Of an iteration without prompts: this, and"""
    sequence: float = 0.0
    """this for each sequence. Both 0: not known."""
    prompt_token: float = 0.0
    """For each token of a prompt. 0: not known."""

    @property
    def known(self) -> bool:
        """Whether it says how long an iteration takes."""
        return self.fixed > 0 or self.sequence > 0

    def with_iterations_of(self, other: "StepProfile") -> "StepProfile":
        return StepProfile(other.fixed, other.sequence, self.prompt_token)

    @property
    def knee(self) -> float:
        """The number of sequences beyond which one more costs more than it gives: the time of a token grows by a larger
        part than the number of tokens in a second. That is where the sequences take as long as the fixed part."""
        if self.sequence <= 0:
            return inf
        return self.fixed / self.sequence

    def answer_cost(self, sequences: int) -> float:
        """The time of a token of an answer in a batch of `sequences`, over that of one of a prompt. 0: not known."""
        iteration = self.fixed + self.sequence * sequences
        return iteration / sequences / self.prompt_token if self.prompt_token > 0 else 0.0


NO_PROFILE = StepProfile()
