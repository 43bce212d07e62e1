"""What the API server does not let us do, until it does: rights that were never granted or were taken away, and writes
that it refuses for reasons of its own."""

from motet_operator.cluster.api import Refused
from motet_operator.cluster.kinds import CHILDREN, Kind
from motet_operator.cluster.obstacles import Obstacle, Obstacles
from motet_operator.cluster.writes import WriteKey


class Denials:
    def __init__(self) -> None:
        self._lists: dict[tuple[Kind, str], Obstacle] = {}
        self._writes: dict[WriteKey, Obstacle] = {}

    def note(self, refused: Refused) -> None:
        """A list that is forbidden, until `clear`."""
        self._lists[refused.kind, refused.namespace] = permission(refused)

    def clear(self, kind: Kind, namespace: str) -> None:
        self._lists.pop((kind, namespace), None)

    def hinder(self, key: WriteKey, obstacle: Obstacle) -> bool:
        """A write that is not done, until `forget`. Whether that is news: one right may be missing for many."""
        news = obstacle not in self._writes.values()
        self._writes[key] = obstacle
        return news

    def forget(self, key: WriteKey) -> None:
        self._writes.pop(key, None)

    def standing(self, unseen: frozenset[str] = frozenset()) -> Obstacles:
        places = {namespace: why for (kind, namespace), why in self._lists.items() if kind in CHILDREN}
        return Obstacles(unseen=unseen, places=places, writes=dict(self._writes))

    def __len__(self) -> int:
        return len(self._lists) + len(self._writes)


def permission(refused: Refused) -> Obstacle:
    resource = f"{refused.kind.resource}/status" if refused.subresource else refused.kind.resource
    where = f"in namespace {refused.namespace}" if refused.namespace else "in all namespaces"
    return Obstacle(
        "PermissionDenied",
        f"the operator may not {refused.verb} {resource} {where}; grant its ServiceAccount that verb",
    )


def refusal(refused: Refused) -> Obstacle:
    """In the server's words: they are those of a quota, of a policy, of a schema, and name what to change."""
    return Obstacle("RunnersRefused", f"the API server refuses to {refused.verb} {refused.kind.resource}: {refused}")
