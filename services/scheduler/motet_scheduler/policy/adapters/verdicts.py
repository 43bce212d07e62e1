"""Which runner may serve which adapter: what a runner has certified, refused or proved, and what serves therefore.

If a revision is certified, the adapter's name points to its digest at once. What a runner refuses may be its own fault,
so what serves goes on until all runners have refused it (`revision_state.py`)."""

from collections.abc import Collection, Container, Iterable
from dataclasses import replace

from motet.domain import Digest
from motet.runner_info import Failure
from motet_scheduler.policy.adapters.adapter import Adapter, Revision
from motet_scheduler.policy.adapters.adapters import Adapters
from motet_scheduler.policy.adapters.orders import Orders
from motet_scheduler.policy.adapters.revision_state import RevisionState, Standing, Start, is_wrong
from motet_scheduler.policy.adapters.table import AdapterTable
from motet_scheduler.policy.events import AdapterStateChanged
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.suspects import Suspects
from motet_scheduler.policy.values import DIFFER, MAX_BUILDS, MAX_KERNELS, GroupName, RevisionKey

MAX_HAD = 4
"""Earlier revisions of an adapter of which it is remembered who had them, and runners of each"""


class AdapterVerdicts:
    def __init__(self, adapters: Adapters, table: AdapterTable, orders: Orders) -> None:
        self._adapters = adapters
        self._table = table
        self._orders = orders
        self.suspects = Suspects()
        self._withdrawn = False
        self._moved_groups: dict[GroupName, None] = {}
        """In which runners may serve some adapter, or may not, that was otherwise at `take_moved`."""

    def certified(
        self,
        adapter: Adapter,
        key: RevisionKey,
        event: AdapterStateChanged,
        start: Start,
        runners: Collection[Runner],
    ) -> None:
        for cleared in self.suspects.certified(event.instance):
            self._tell_of_refusals_by(cleared)
        replaced, state = adapter.serving, self._with_refusals(adapter, key, event.digest, start, runners)
        revision = Revision(key=key, digest=event.digest, certificate=event.certificate, bytes=event.bytes)
        self._adapters.serve(adapter, revision)
        self._adapters.put(adapter, key, state.certified(start))
        if replaced is not None:
            self._adapters.put(adapter, replaced.key, adapter.state_of(replaced.key))
            if replaced.digest != event.digest:
                adapter.had.pop(replaced.digest, None)
                adapter.had[replaced.digest] = tuple(self._table.tiers.get(replaced.digest, ()))[:MAX_HAD]
                if len(adapter.had) > MAX_HAD:
                    del adapter.had[next(iter(adapter.had))]
                self._adapters.retire(adapter, replaced)

    def refused(
        self,
        adapter: Adapter,
        key: RevisionKey,
        failure: Failure,
        start: Start,
        runners: Iterable[Runner],
        *,
        digest: Digest,
    ) -> None:
        """What a runner computes with this revision is wrong. Either may be the cause."""
        name, serving = adapter.spec.ref.object, adapter.serving
        self._put_refusal(adapter, key, start, failure)
        if serving is not None and serving.key == key:
            for runner in runners:
                if runner.start == start:
                    self._may_not_serve(runner, serving.digest, str(name), failure)
        if is_wrong(failure) and self.suspects.proof_failed(start, str(name), digest):
            self._tell_of_refusals_by(start)

    def refused_on(
        self,
        runner: Runner,
        digest: Digest,
        adapter: str,
        failure: Failure,
        runners: Collection[Runner],
        *,
        some_may_return: bool = False,
    ) -> None:
        """A runner has found by itself that what it computes with these bytes is wrong. `adapter`: under which name."""
        start, new = runner.start, self._may_not_serve(runner, digest, adapter, failure)
        for one, key in self._adapters.served_by(runner, digest):
            if new and not runner.may_serve(digest, str(one.spec.ref.object)):
                self.refused(one, key, failure, start, runners, digest=digest)
        self.withdraw_all(digest, runners, some_may_return=some_may_return)

    def proved(self, runner: Runner, event: AdapterStateChanged) -> None:
        """A runner says which of its kernels have proved what it serves."""
        adapter, certificate = self._adapters.by_name.get(event.ref.object), event.certificate
        if adapter is None or adapter.serving is None or certificate is None or adapter.serving.certificate is None:
            return
        serving, before = adapter.serving, adapter.serving.certificate
        if serving.digest != event.digest or certificate.base_digest != before.base_digest:
            return
        names = tuple(dict.fromkeys((*before.proved_by, *certificate.proved_by)))[:MAX_KERNELS]
        builds = tuple(dict.fromkeys((*before.proved_builds, *certificate.proved_builds)))[-MAX_BUILDS:]
        now = replace(before, proved_by=names, proved_builds=builds)
        if certificate.recorded_answers and before.recorded_answers != DIFFER:  # one that differs is not taken back
            now = replace(
                now,
                recorded_answers=certificate.recorded_answers,
                max_delta_to_reference=certificate.max_delta_to_reference,
                warnings=certificate.warnings,
            )
        if now != before:
            adapter.serving = replace(serving, certificate=now)
            self._adapters.tell(adapter)
        state, start = adapter.state_of(serving.key), runner.start
        doubted = state.standing is Standing.DOUBTED or state.is_refused_by(start)
        if certificate.is_proof and doubted:  # it may have refused it with other kernels
            self._adapters.put(adapter, serving.key, state.certified(start))
            self._adapters.tell(adapter)
            self._may_serve(runner, serving.digest, str(adapter.spec.ref.object))

    def checked_anew(self, event: AdapterStateChanged) -> None:
        """A runner with newer checks has loaded what serves. They may know of a chat template that older ones did not
        look for, as after an upgrade."""
        adapter, certificate = self._adapters.by_name.get(event.ref.object), event.certificate
        if adapter is None or (serving := adapter.serving) is None or certificate is None:
            return
        before = serving.certificate
        if serving.digest != event.digest or before is None or certificate.base_digest != before.base_digest:
            return
        if certificate.checker > before.checker:
            now = replace(before, checker=certificate.checker, template_digest=certificate.template_digest)
            adapter.serving = replace(serving, certificate=now)
            self._adapters.tell(adapter)

    def refuses_only(self, runner: Runner, digests: Container[Digest]) -> None:
        """It has told all that its proofs have found wrong: the rest it has proved while it was away."""
        for digest in runner.refused.not_among(digests):
            self._may_serve(runner, digest, "")

    def runner_gone(self, runner: Runner) -> None:
        """It is forgotten, or has been restarted."""
        start = runner.start
        self.suspects.forget(start)
        for name in list(self._adapters.judged):  # mostly few, of thousands
            del self._adapters.judged[name]  # it comes back if it still names others
            if (adapter := self._adapters.by_name.get(name)) is None:
                continue
            for key, state in list(adapter.states.items()):
                if state.names_runners:
                    self._adapters.put(adapter, key, state.without(start))
                    self._adapters.tell(adapter)

    def withdraw_all(self, digest: Digest, runners: Collection[Runner], *, some_may_return: bool) -> None:
        """Those that serve these bytes"""
        for one in [*self._adapters.that_serve(digest)]:
            self.withdraw(one, runners, some_may_return=some_may_return)

    def withdraw(self, adapter: Adapter, runners: Collection[Runner], *, some_may_return: bool) -> None:
        """What serves does so no longer if all runners have refused it that are known, also those that are away, and no
        other one may come."""
        serving = adapter.serving
        if serving is None or some_may_return or (serving.key != adapter.wanted and not adapter.newest.ended):
            return
        state, key = adapter.state_of(serving.key), serving.key
        of_base = [one for one in runners if one.group == key.group and one.serves(key.base)]
        if state.asked is not None or not of_base or not is_refused_by_all(adapter, serving, of_base):
            return
        self._adapters.retire(adapter)
        self._adapters.serve(adapter, None)
        self._withdrawn = True
        self._adapters.put(adapter, serving.key, state.nobody_left())
        self._adapters.tell(adapter)

    def take_withdrawn(self) -> bool:
        """Whether something was withdrawn since this was called last."""
        withdrawn, self._withdrawn = self._withdrawn, False
        return withdrawn

    def take_moved(self) -> dict[GroupName, None]:
        """The groups in which other runners may serve some adapter than when this was called last."""
        moved, self._moved_groups = self._moved_groups, {}
        return moved

    # --------------------------------------------------------------------------------------------- internals

    def _put_refusal(self, adapter: Adapter, key: RevisionKey, start: Start, failure: Failure) -> None:
        self._adapters.put(adapter, key, adapter.state_of(key).refused(start, failure))
        self._adapters.tell(adapter)
        self._orders.changed = True

    def _may_not_serve(self, runner: Runner, digest: Digest, adapter: str, failure: Failure) -> bool:
        """→ True if it might before. So it is under each name that serves these bytes, if they are the cause."""
        if not runner.refuse(digest, adapter, failure):
            return False
        self._moved_groups[runner.group] = None
        for one, key in self._adapters.served_by(runner, digest):
            if not (
                runner.may_serve(digest, str(one.spec.ref.object)) or one.state_of(key).is_refused_by(runner.start)
            ):
                self._put_refusal(one, key, runner.start, failure)
        return True

    def _may_serve(self, runner: Runner, digest: Digest, adapter: str) -> None:
        """It has certified what it has refused before."""
        if not runner.accept(digest, adapter):
            return
        self._moved_groups[runner.group] = None
        for one, key in self._adapters.served_by(runner, digest):
            state, start = one.state_of(key), runner.start
            if state.is_refused_by(start) and runner.may_serve(digest, str(one.spec.ref.object)):
                self._adapters.put(one, key, state.certified(start))
                self._adapters.tell(one)

    def _with_refusals(
        self, adapter: Adapter, key: RevisionKey, digest: Digest, start: Start, runners: Iterable[Runner]
    ) -> RevisionState:
        """A runner has certified a revision, so its digest is known. Others may have refused it, or these bytes; what
        they have refused for an earlier manifest of this name does not count."""
        name, state = str(adapter.spec.ref.object), adapter.states[key]
        is_new = adapter.serving is None or adapter.serving.key != key
        for runner in runners:
            if runner.group != key.group or not runner.serves(key.base):
                continue
            if is_new and runner.forget_refusal(digest, name):
                self._moved_groups[runner.group] = None
            if (one := runner.start) == start:
                self._may_serve(runner, digest, name)
            elif (refusal := state.refusal_of(one)) is not None:
                self._may_not_serve(runner, digest, name, refusal.failure)
            elif (failure := runner.refused.why(digest, name)) is not None:
                state = state.refused(one, failure)
        return state

    def _tell_of_refusals_by(self, start: Start) -> None:
        for adapter in self._adapters:
            if any(state.is_refused_by(start) for state in adapter.states.values()):
                self._adapters.tell(adapter)


def is_refused_by_all(adapter: Adapter, serving: Revision, runners: Iterable[Runner]) -> bool:
    """Its state remembers some runners, and each runner some adapters."""
    state, name = adapter.state_of(serving.key), str(adapter.spec.ref.object)
    return bool(state.refusals) and all(
        state.is_refused_by(one.start) or not one.may_serve(serving.digest, name) for one in runners
    )
