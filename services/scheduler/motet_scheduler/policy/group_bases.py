"""Which base model each group serves: the one that most of its runners have, of those that take work.

So the rollout of another model switches in its middle, and a runner that comes or goes for a moment switches nothing.
After a start some runners are missed: a base model that they could outvote is not chosen. A
group in which no runner takes work keeps the last one, as long as its pools have the same model. Requests of before
stay on theirs (see `replaced_bases`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import BaseModel, GroupName

Models = Mapping[GroupName, set[str]]
"""The URIs of the models that the pools of each group have."""


@dataclass(frozen=True, slots=True)
class GroupBase:
    model: BaseModel = field(default_factory=BaseModel)
    max_model_length: int = 0


UNKNOWN = GroupBase()
"""Of a group whose model no runner ever had."""


class GroupBases:
    def __init__(self) -> None:
        self.current: dict[GroupName, GroupBase] = {}
        self._at_work: dict[GroupName, dict[str, BaseModel]] = {}
        """By digest: the base models of the runners that take work."""
        self._replaced: dict[GroupName, set[str]] = {}
        """Groups whose pools have another model by now, while runners with the former one still take work, and the
        URIs of that: their pools may have it again."""

    def of(self, group: GroupName) -> GroupBase:
        return self.current.get(group, UNKNOWN)

    def models_changed(self, before: Models, now: Models) -> list[GroupName]:
        """Forget the base models of groups whose pools have another model now: of those in which a runner takes work,
        when the last one leaves. Returns those that were forgotten now."""
        for group in self.current:
            former = self._replaced.pop(group, None) or before.get(group, set())
            if not former & now.get(group, set()):
                self._replaced[group] = former
        gone = [group for group in self._replaced if not self._at_work.get(group)]
        for group in gone:
            self._forget(group)
        return gone

    def _forget(self, group: GroupName) -> None:
        del self.current[group]
        self._at_work.pop(group, None)
        del self._replaced[group]

    def find(self, group: GroupName, digest: str) -> BaseModel | None:
        """The base model with this digest, if new requests of the group can have it."""
        current = self.of(group).model
        return current if current.digest == digest else self._at_work.get(group, {}).get(digest)

    def known(self, group: GroupName) -> bool:
        return group in self.current

    def runners_changed(self, group: GroupName, runners: Iterable[Runner], missed: float = 0) -> bool:
        """These are the group's runners now, and `missed` more may come back. True if that changes which base models
        its new requests can have."""
        before = self.of(group).model.digest, self._at_work.get(group, {}).keys()
        votes = Counter(
            GroupBase(runner.base, runner.capacity.max_model_length) for runner in runners if runner.takes_work
        )
        self._at_work[group] = {base.model.digest: base.model for base in votes}
        most = max(votes.values(), default=0)
        # Those that are missed may have the present one or, as long as none is known, any other.
        others = votes[self.of(group)] if self.known(group) or not missed else votes.total() - most
        if most > others + missed:
            self.current[group] = max(votes, key=lambda base: votes[base])
            self._replaced.pop(group, None)
        if not votes and group in self._replaced:
            self._forget(group)
        return before != (self.of(group).model.digest, self._at_work.get(group, {}).keys())
