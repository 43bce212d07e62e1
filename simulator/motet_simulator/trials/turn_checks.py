"""What must hold after each turn of a runner: what breaks and heals again before the next look counts, too."""

from motet.domain import RequestId
from motet_runner.plan.planner import Planner
from motet_runner.plan.sequence import Sequence


class TurnChecks:
    """They are cheap: engines take thousands of turns in a trial."""

    def __init__(self) -> None:
        self._sequences: dict[str, list[Sequence]] = {}
        self._live: dict[str, set[tuple[RequestId, int]]] = {}
        self._most_promised: dict[str, int] = {}
        """What was promised after the latest turn, or its limit if that was more."""

    def check(self, host: str, planner: Planner) -> None:
        """Raises AssertionError."""
        sequences = list(planner.sequences)
        if sequences != self._sequences.get(host):  # few turns change them
            self._sequences[host] = sequences
            live = {(sequence.request, sequence.new.epoch) for sequence in sequences}
            for other, theirs in self._live.items():
                both = live & theirs
                assert other == host or not both, f"{sorted(both)} on {other} and on {host}"
            self._live[host] = live
        ledger = planner.memory.ledger
        if ledger.by_forecast:  # which may grow with each token
            return
        promised, limit = ledger.promised, ledger.limit
        # The limit may fall below what is promised already, also to what was promised in the same turn before.
        assert promised <= max(limit, self._most_promised.get(host, 0)), (
            f"{host} promises {promised} pages, {limit} at most"
        )
        self._most_promised[host] = max(promised, limit)

    def forget(self, host: str) -> None:
        """The process there has ended."""
        self._sequences.pop(host, None)
        self._live.pop(host, None)
        self._most_promised.pop(host, None)
