"""An iteration that is planned and not yet collected."""

from dataclasses import dataclass, field

from motet_runner.plan.composer import Work
from motet_runner.plan.decode_round import DecodeRound
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.step_plan import DecodeRows, RowStep


@dataclass(frozen=True, slots=True)
class Launched:
    """The sequences, the worker's orders, and each sequence's `restarts` when the iteration was planned."""

    decoding: list[Sequence]
    decodes: DecodeRows
    decoding_restarts: list[int]
    prefills: list[Work] = field(default_factory=list)
    steps: tuple[RowStep, ...] = ()
    restarts: list[int] = field(default_factory=list)
    round: DecodeRound | None = None
    """The round to which it belongs"""

    def samples_of(self, sequence: Sequence) -> int:
        """How many tokens of a sequence it samples."""
        decodes = sum(one is sequence for one in self.decoding)
        return decodes + sum(work.samples for work in self.prefills if work.sequence is sequence)
