"""How sequences begin and end, by commands, results or self-protection."""

from motet.domain import Digest
from motet.errors import MotetError
from motet_runner.interface import DecodedTokens, Finish, SequenceOutput, State
from motet_runner.plan.length_rope import LengthRope
from motet_runner.plan.sequence import Sequence
from motet_runner.plan.sequence_memory import SequenceMemory
from motet_runner.plan.sequence_table import SequenceTable


class SequenceLives:
    def __init__(self, sequences: SequenceTable, memory: SequenceMemory, rope: LengthRope | None) -> None:
        self._sequences = sequences
        self._memory = memory
        self._rope = rope
        self.outputs: list[SequenceOutput] = []
        """The sequences' outputs since they were last taken"""
        self.decoded: DecodedTokens | None = None
        """The outputs of an iteration before `outputs`, if they are only tokens"""

    def begin_keys(self, sequence: Sequence) -> None:
        """To be called while no key is computed: sets which pages may hold its keys, and how long they stay right."""
        new, rope, tokens = sequence.new, self._rope, len(sequence.tokens)
        salt = rope.salt(len(new.prompt), tokens) if rope is not None else b""
        sequence.chain = self._memory.chain_of(new, salt)
        sequence.restarts_after = rope.restarts_after(tokens) if rope is not None else None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, and free all that it holds."""
        self._memory.release(sequence)
        self._sequences.remove(sequence)

    def may_serve(self, adapter: Digest) -> None:
        """Sequences need wait no longer, if the adapter is on the device and may serve."""
        if self._memory.adapters.is_here(adapter):
            for sequence in [one for one in self._sequences if one.state is State.LOADING and one.adapter == adapter]:
                self._sequences.enter(sequence, State.WAITING)

    def give_up(self, sequence: Sequence, error: MotetError) -> None:
        """End a sequence with an error."""
        new, index = sequence.new, sequence.output_tokens
        failed = SequenceOutput(new.request, new.epoch, new.choice, index, [], finish=Finish.FAILED, error=error)
        failed.promise_number = sequence.promise_number
        self.outputs.append(failed)
        self.remove(sequence)

    def add_decoded(self, decoded: DecodedTokens) -> None:
        """Add the result of an iteration that has only tokens."""
        if self.decoded is None and not self.outputs:
            self.decoded = decoded
        else:  # outputs must stay in the order of iterations
            self.expand_decoded()
            self.outputs += decoded.outputs()

    def add_before(self, place: int, decoded: DecodedTokens) -> None:
        """The same, if outputs from `place` on are of the same iteration."""
        if not place and self.decoded is None:
            self.decoded = decoded
        else:
            self.outputs[place:place] = decoded.outputs()

    def expand_decoded(self) -> None:
        """If the columns were not taken, turn them into ordinary outputs."""
        if self.decoded is not None:
            self.outputs[:0] = self.decoded.outputs()
            self.decoded = None
