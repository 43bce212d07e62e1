"""The sequences of an engine and their states.

LOADING → WAITING → PREFILL → DECODE → gone
   ↑         ↑          ↓        ↓
   └─────────┴────── PARKED ←────┘
"""

from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from motet.domain import Digest, RequestId
from motet_runner.interface import Event, State, StateChanged
from motet_runner.plan.sequence import Sequence
from motet_runner.row_mask import RowMask


class SequenceTable:
    def __init__(self) -> None:
        self.events: list[Event] = []
        """Events since they were last taken. Memory and planner add theirs."""
        self._sequences: dict[RequestId, Sequence] = {}
        self._users: Counter[Digest] = Counter()
        self._parked: Counter[Digest] = Counter()
        self._live: set[Digest] = set()
        """Adapters (or the base) with users that are not parked. Each iteration asks for all on the device."""
        self.late: list[Sequence] = []
        """Those that sit out iterations. They keep their places, pages and states, and may be parked."""
        self._masks: list[RowMask] = []
        """Those that other threads may still make, also of sequences that have left."""
        self._runnable: list[Sequence] | None = None
        """None: must be computed again"""

    def __iter__(self) -> Iterator[Sequence]:
        """In order of arrival."""
        return iter(self._sequences.values())

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.request) is sequence

    def get(self, request: RequestId) -> Sequence | None:
        return self._sequences.get(request)

    def of_epoch(self, request: RequestId, epoch: int) -> Sequence | None:
        sequence = self._sequences.get(request)
        return sequence if sequence is not None and sequence.new.epoch == epoch else None

    def live_on(self, adapter: Digest) -> int:
        """How many sequences need the adapter on the device. A parked sequence does not: the adapter loads again with
        it."""
        users = self._users.get(adapter, 0)
        return users - self._parked.get(adapter, 0) if users else 0  # of most adapters of a report

    def live_adapters(self) -> AbstractSet[Digest]:
        """Each adapter (or the base) that at least one sequence needs on the device. Their order has no meaning."""
        return self._live

    def has_users(self, adapter: Digest) -> bool:
        """True if sequences need the adapter now, or when they resume."""
        return adapter in self._users

    def count(self, *states: State) -> int:
        return sum(sequence.state in states for sequence in self)

    def runnable(self) -> list[Sequence]:
        """In order of arrival. The same list object while no sequence comes, goes or changes its state."""
        if self._runnable is None:
            runs = (State.WAITING, State.PREFILL, State.DECODE)
            self._runnable = [s for s in self if s.state in runs and not s.late]
        return self._runnable

    @property
    def late_suspect(self) -> Sequence | None:
        """Its mask is computed alone, like its iterations."""
        return next((one for one in self.late if one.suspect and one.state is not State.PARKED), None)

    @property
    def masks_to_come(self) -> list[RowMask]:
        """Other threads make them now."""
        self._masks = [mask for mask in self._masks if mask.late]
        return self._masks

    @property
    def late_with_places(self) -> int:
        return sum(sequence.state is not State.PARKED for sequence in self.late)

    def parked(self) -> list[Sequence]:
        """In order of arrival."""
        if not self._parked:
            return []
        return sorted((s for s in self if s.state is State.PARKED), key=lambda sequence: sequence.arrival)

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.request] = sequence
        self._runnable = None
        self._users[sequence.adapter] += 1
        self._live.add(sequence.adapter)

    def remove(self, sequence: Sequence) -> None:
        if sequence.state is State.PARKED:
            _one_less(self._parked, sequence.adapter)
        _one_less(self._users, sequence.adapter)
        self._note_live(sequence.adapter)
        del self._sequences[sequence.request]
        if sequence.late:
            self.late.remove(sequence)
        self._runnable = None

    def enter(self, sequence: Sequence, state: State) -> None:
        if sequence.state is State.PARKED:
            _one_less(self._parked, sequence.adapter)
        if state is State.PARKED:
            self._parked[sequence.adapter] += 1
        if State.PARKED in (state, sequence.state):
            self._note_live(sequence.adapter)
        sequence.state = state
        self._runnable = None
        self.events.append(StateChanged(sequence.request, sequence.new.epoch, state))

    def sits_out(self, sequence: Sequence) -> None:
        """Until `take_back` finds its mask. One that has left is only noted: its mask is still being made."""
        if sequence.new.mask is not None and sequence.new.mask not in self.masks_to_come:
            self._masks.append(sequence.new.mask)
        if sequence not in self:
            return
        sequence.late = True
        self.late.append(sequence)
        self._runnable = None

    def take_back(self) -> None:
        """Sequences whose masks have come go on."""
        for sequence in [one for one in self.late if one.new.mask is None or not one.new.mask.late]:
            sequence.late = False
            self.late.remove(sequence)
            self._runnable = None

    def _note_live(self, adapter: Digest) -> None:
        if self.live_on(adapter):
            self._live.add(adapter)
        else:
            self._live.discard(adapter)

    def check(self) -> None:
        known = self._runnable
        self._runnable = None
        assert known is None or known == self.runnable(), known
        self._runnable = known
        assert self.late == [s for s in self.late if s in self and s.late], self.late
        assert len(self.late) == sum(s.late for s in self), self.late
        assert self._users == Counter(sequence.adapter for sequence in self), self._users
        assert self._parked == Counter(s.adapter for s in self if s.state is State.PARKED), self._parked
        assert self._live == {s.adapter for s in self if s.state is not State.PARKED}, self._live


def _one_less(counter: Counter[Digest], adapter: Digest) -> None:
    """Also forgets an adapter without users, since the number of adapters over time is unbounded."""
    counter[adapter] -= 1
    if not counter[adapter]:
        del counter[adapter]
