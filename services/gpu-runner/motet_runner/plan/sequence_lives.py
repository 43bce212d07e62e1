"""How sequences begin and end, whoever decides it: commands, results or self-protection."""

from motet.errors import MotetError
from motet_runner.interface import DecodedTokens, Finish, SequenceOutput
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
        """What sequences have brought since somebody took it"""
        self.decoded: DecodedTokens | None = None
        """The same of an iteration before those of `outputs`, if it has brought only tokens"""

    def begin_keys(self, sequence: Sequence) -> None:
        """None of its keys is computed. Say which pages may hold them, and how long they stay right."""
        new, rope, tokens = sequence.new, self._rope, len(sequence.tokens)
        salt = rope.salt(len(new.prompt), tokens) if rope is not None else b""
        sequence.chain = self._memory.chain_of(new, salt)
        sequence.restarts_after = rope.restarts_after(tokens) if rope is not None else None

    def remove(self, sequence: Sequence) -> None:
        """It leaves, and all that it holds is free."""
        self._memory.release(sequence)
        self._sequences.remove(sequence)

    def give_up(self, sequence: Sequence, error: MotetError) -> None:
        """It leaves with an error."""
        new, index = sequence.new, sequence.output_tokens
        failed = SequenceOutput(new.request, new.epoch, new.choice, index, [], finish=Finish.FAILED, error=error)
        self.outputs.append(failed)
        self.remove(sequence)

    def add_decoded(self, decoded: DecodedTokens) -> None:
        """Another iteration has brought only tokens."""
        if self.decoded is None and not self.outputs:
            self.decoded = decoded
        else:  # they must stay in the order of iterations
            self.expand_decoded()
            self.outputs += decoded.outputs()

    def expand_decoded(self) -> None:
        """Nobody has taken the columns: their tokens become outputs like all others."""
        if self.decoded is not None:
            self.outputs[:0] = self.decoded.outputs()
            self.decoded = None
