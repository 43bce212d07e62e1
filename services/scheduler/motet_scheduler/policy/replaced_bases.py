"""Which base models the runners of a group have: two of them, while the group changes from one to the other.

A request stays on the base model that its prompt was tokenised for. When the last runner of that one leaves, the
requests that wait for it are refused. If a client has no token yet, its gateway tokenises for the new base model and
asks again; else the stream ends with this error.
"""

from itertools import islice
from math import inf

from motet.errors import BaseModelReplaced
from motet.runner_info import Failure
from motet_scheduler.policy.request_lifecycle import RequestLifecycle
from motet_scheduler.policy.state import SchedulerState
from motet_scheduler.policy.values import GroupName

REPLACED = BaseModelReplaced(
    "The base model was replaced while this request ran, and no runner has the old one any more. Send the request "
    "again: the new base model answers it."
)

REFUSED_AT_ONCE = 200
"""In one look: refusing ten thousand would delay everything else."""


class ReplacedBases:
    def __init__(self, state: SchedulerState, lifecycle: RequestLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def look_from(self) -> float:
        """Requests may wait for another base model than the one that their group has now."""
        bases = self._state.bases
        waits = any(
            queue.bases.keys() - {"", bases.of(group).model.digest} for group, queue in self._state.queues.items()
        )
        return self._state.attached_by if waits and self._state.may_place else inf

    def look(self) -> None:
        # After a start, the runners of the previous scheduler have this long to attach.
        if not self._state.may_place or self._state.now < self._state.attached_by:
            return
        for group, queue in self._state.queues.items():
            left = self._bases_left(group) if queue.bases.keys() - {""} else set()
            gone = queue.bases.keys() - left - {""} if left else set()
            if gone:
                orphans = (request for *_, request in queue.unordered() if request.base in gone)
                for request in list(islice(orphans, REFUSED_AT_ONCE)):
                    self._lifecycle.refuse(request, Failure.of(REPLACED))

    def _bases_left(self, group: GroupName) -> set[str]:
        """The base models that requests can wait for. Empty if no runner takes work: any one may come back then."""
        runners = self._state.runners_of(group)
        if not any(runner.takes_work for runner in runners):
            return set()
        return {runner.base.digest for runner in runners if runner.drain is None}
