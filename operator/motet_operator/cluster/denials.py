"""What the API server does not let us do, until it does: rights that were never granted, or that were taken away."""

from motet_operator.cluster.api import Refused
from motet_operator.cluster.kinds import CHILDREN, Kind


class Denials:
    def __init__(self) -> None:
        self._denied: dict[tuple[str, Kind, str, bool], str] = {}

    def note(self, refused: Refused) -> bool:
        """Whether it is news."""
        key = (refused.verb, refused.kind, refused.namespace, refused.subresource)
        news = key not in self._denied
        self._denied[key] = self.sentence(refused)
        return news

    @staticmethod
    def sentence(refused: Refused) -> str:
        resource = f"{refused.kind.resource}/status" if refused.subresource else refused.kind.resource
        where = f"in namespace {refused.namespace}" if refused.namespace else "in all namespaces"
        return f"the operator may not {refused.verb} {resource} {where}; grant its ServiceAccount that verb"

    def clear(self, verb: str, kind: Kind, namespace: str, *, subresource: bool = False) -> None:
        self._denied.pop((verb, kind, namespace, subresource), None)

    def of_runners(self, namespace: str) -> str:
        """Why runners in this namespace are not what they should be; empty: nothing is in the way."""
        return next(
            (
                why
                for (_, kind, where, _), why in sorted(self._denied.items(), key=lambda one: one[1])
                if where == namespace and kind in CHILDREN
            ),
            "",
        )

    def __len__(self) -> int:
        return len(self._denied)
