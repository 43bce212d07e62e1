"""Where the choices of one call run. They have the same prompt, so each goes where the others are, and shares pages.

A call with several choices (`n` > 1) is a family: the first choice is the parent of the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from motet.domain import InstanceName, RequestId
from motet_scheduler.policy.requests import Request

NOWHERE = InstanceName("")


@dataclass(slots=True)
class _Family:
    children: int = 0
    instance: InstanceName = NOWHERE
    """Where one of them was placed last. The runner may be gone."""


class Families:
    """Only families with children are listed. The parent may have ended, or may never have been known."""

    def __init__(self) -> None:
        self._families: dict[RequestId, _Family] = {}
        """By parent."""

    def begin(self, request: Request, requests: Mapping[RequestId, Request]) -> None:
        if request.parent is None:
            return
        family = self._families.get(request.parent)
        if family is None:
            family = self._families[request.parent] = _Family()
            parent = requests.get(request.parent)
            if parent is not None and parent.placement is not None:
                family.instance = parent.placement.instance
        family.children += 1

    def end(self, request: Request) -> None:
        if request.parent is None:
            return
        family = self._families[request.parent]
        family.children -= 1
        if not family.children:
            del self._families[request.parent]

    def placed(self, request: Request, instance: InstanceName) -> None:
        family = self._families.get(request.parent or request.id)
        if family is not None:
            family.instance = instance

    def near(self, request: Request) -> InstanceName:
        """The runner of the other choices of the same call; empty: there is none."""
        family = self._families.get(request.parent or request.id)
        return family.instance if family is not None else NOWHERE

    def check(self, requests: Mapping[RequestId, Request]) -> None:
        """Count again. Raises AssertionError if the counts differ."""
        counted: dict[RequestId, int] = {}
        for request in requests.values():
            if request.parent is not None:
                counted[request.parent] = counted.get(request.parent, 0) + 1
        assert counted == {parent: family.children for parent, family in self._families.items()}, "miscounted choices"
