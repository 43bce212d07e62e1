"""Which runner checks which new revision, and what it has answered.

A revision says where the bytes are (source, source revision, Secret), which bytes they are (expected digest, content
stamp) and what they are checked for (group, base model). One runner of the group fetches and checks each new revision.
If it fails, the failure is reported and the old revision continues to serve. If an adapter changes faster than it is
checked, some revisions are skipped, but the last one is always checked."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from motet.change_limit import ChangeLimiter
from motet.domain import Digest, InstanceName, ObjectName
from motet_scheduler.policy.adapters.adapter import NEW, Adapter, DigestSource, Line
from motet_scheduler.policy.adapters.adapters import Adapters
from motet_scheduler.policy.adapters.orders import Orders
from motet_scheduler.policy.adapters.revision_state import Asked, is_refusal, may_be_elsewhere
from motet_scheduler.policy.adapters.verdicts import AdapterVerdicts, is_refused_by_all
from motet_scheduler.policy.effects import EnsureAdapter
from motet_scheduler.policy.events import AdapterStateChanged
from motet_scheduler.policy.group_bases import GroupBases
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import AdapterStage, GroupName, RevisionKey, SchedulerConfig

CHECKS_AT_ONCE = 4
"""Per runner, so that many new adapters do not overload it."""
MAX_CHECKS_AT_WORK = 4 * CHECKS_AT_ONCE
"""Per runner, with those that take so long that they hold up no others"""
MAX_CHECKS_OF_A_LINE = MAX_CHECKS_AT_WORK - CHECKS_AT_ONCE
"""Of these, for one namespace: however long its checks take, those of others begin."""


class Check(NamedTuple):
    """A runner was asked to check a revision."""

    adapter: Adapter
    key: RevisionKey
    asked: Asked


class AdapterChecks:
    def __init__(
        self, config: SchedulerConfig, bases: GroupBases, adapters: Adapters, verdicts: AdapterVerdicts, orders: Orders
    ) -> None:
        self._policy = config
        self._bases = bases
        self._adapters = adapters
        self._verdicts = verdicts
        self._orders = orders
        self._changes = ChangeLimiter[ObjectName](config.revision_pause)
        """Recent checks, also of adapters that were removed or suspended: they may return."""
        self._expire_at = -math.inf

    def end(self, runners: Collection[Runner], now: float, some_may_return: Callable[[GroupName], bool]) -> bool:
        """End those whose runner has gone or does not answer. → True if nobody is left to ask for a revision, so that
        it is refused. What serves stays while a runner is away: it may be the one that computes it rightly."""
        self._adapters.to_check.look(now)
        if not (asked := self._adapters.to_check.with_states()):
            return False
        here = {runner.start for runner in runners if runner.attached}
        of_base: defaultdict[tuple[GroupName, str], list[Runner]] = defaultdict(list)
        for runner in runners:
            of_base[runner.group, runner.base.digest].append(runner)
        refused = False
        for adapter in asked:
            key = adapter.asked_for
            state = adapter.state_of(key) if key is not None else NEW
            if key is not None and (check := state.asked) is not None:
                if check.runner not in here:
                    self._adapters.put(adapter, key, state.unanswered())
                elif now >= check.since + self._policy.load_retry:
                    self._adapters.put(adapter, key, state.overdue())
            refused |= self._nobody_left(adapter, runners, now)
            if (serving := adapter.serving) is None or not adapter.state_of(serving.key).refusals:
                continue
            if is_refused_by_all(adapter, serving, of_base[serving.key.group, serving.key.base]):
                self._verdicts.withdraw(adapter, runners, some_may_return=some_may_return(adapter.spec.group))
        return refused

    def orders(self, runners: Collection[Runner], now: float) -> Iterator[EnsureAdapter]:
        """Ask one runner of the group to fetch and check each new revision: those of each namespace in turn."""
        if now >= self._expire_at:  # not with each event: there may be as many as adapters
            self._changes.expire(now)
            self._expire_at = now + self._policy.revision_pause
        if not self._adapters.to_check:
            return
        asked = self._adapters.to_check.with_states()
        busy = Counter(check.runner[0] for one in asked if (check := one.check) is not None)
        of_lines = Counter((one.line, runner) for one in asked for runner in self._at_work(one, now))
        at_work = Counter[InstanceName]()
        for (_, instance), checks in of_lines.items():
            at_work[instance] += checks

        def is_able(one: Runner) -> bool:
            return busy[one.instance] < CHECKS_AT_ONCE and at_work[one.instance] < MAX_CHECKS_AT_WORK

        for adapter in asked:
            if adapter.over and not self._may_ask(adapter, runners, now):
                self._adapters.to_check.put_aside(adapter)
        free = {one.instance for one in runners if one.takes_work and is_able(one)}
        if not free:
            return  # mostly, if many wait

        # Those that may be given one more check: found once, as many adapters may wait while all runners are busy.
        able: dict[tuple[GroupName, str], list[Runner]] = {}

        def next_of(line: Line, own: Iterator[Adapter]) -> EnsureAdapter | None:
            full = set[tuple[GroupName, str]]()
            for adapter in own:
                of_wanted = adapter.wanted.group, adapter.wanted.base
                if adapter.serving is None and (of_wanted in full or able.get(of_wanted) == []):
                    continue  # all that could check it are busy
                for key in adapter.to_ask(now):
                    of_base = key.group, key.base
                    if of_base not in able:
                        able[of_base] = [one for one in runners if self._may_check(one, key) and is_able(one)]
                    of_line = [one for one in able[of_base] if of_lines[line, one.instance] < MAX_CHECKS_OF_A_LINE]
                    if not of_line:
                        full.add(of_base)
                        continue
                    runner = _best(of_line, adapter, key, busy)
                    if runner is None:
                        continue
                    # An adapter that changes all the time would keep a runner busy. Its newest revision is checked
                    # later.
                    is_new = key == adapter.wanted and not adapter.recheck_requested
                    name = adapter.spec.ref.object
                    if is_new and not self._changes.may_change(name, now):
                        self._orders.look_at(self._changes.next_at(name))
                        continue
                    busy[runner.instance] += 1
                    at_work[runner.instance] += 1
                    of_lines[line, runner.instance] += 1
                    if not is_able(runner):
                        free.discard(runner.instance)
                        for some in able.values():
                            if runner in some:
                                some.remove(runner)
                    if is_new:
                        adapter.recheck_requested = True
                        self._changes.changed(name, now)
                    return self._ask(adapter, key, runner, now)
            return None

        waiting = self._adapters.to_check.in_turn()
        while waiting and free:
            _, place, line, own = heappop(waiting)
            if (order := next_of(line, own)) is not None:
                self._adapters.to_check.had_turn(line, order.order)
                heappush(waiting, (order.order, place, line, own))
                yield order

    def answered_by(self, event: AdapterStateChanged) -> Check | None:
        """What this report answers; None if it answers no check that is known.

        A runner of an earlier version repeats no number: its report counts for the check that it was given last.
        """
        adapter = self._adapters.by_name.get(event.ref.object)
        for key, check in adapter.orders() if adapter is not None else ():
            answers = event.order == check.order if event.order else event.ordered_stage is AdapterStage.CERTIFIED
            if adapter is not None and check.runner[0] == event.instance and answers:
                return Check(adapter, key, check)
        return None

    def reported(
        self,
        answered: Check,
        event: AdapterStateChanged,
        runners: Collection[Runner],
        now: float,
        *,
        some_may_return: bool = False,
    ) -> bool:
        """Apply a runner's report about a check. `some_may_return`: not all runners of the group are known. True if it
        is decided: something was certified, has failed, or does not serve any more."""
        adapter, key, check = answered
        state = adapter.states[key]
        if event.failure is None and event.stage < AdapterStage.CERTIFIED:
            self._adapters.put(adapter, key, state.works(check, now, event.bytes, self._policy.check_patience))
            return False
        if event.certificate is not None and event.certificate.base_digest not in ("", key.base):
            return False  # its runner has another base model by now; without an answer the check is ordered again
        adapter.checked_at = now
        serving = adapter.serving
        if key != adapter.wanted and (serving is None or serving.key != key):
            self._adapters.put(adapter, key, NEW)
            return False  # the revision changed again: the next check is for the new one
        self._adapters.tell(adapter)
        if event.failure is None:
            if not state.refusals or (event.certificate is not None and event.certificate.is_proof):
                self._verdicts.certified(adapter, key, event, check.runner, runners)
                return True
            self._adapters.put(adapter, key, state.unproved(check.runner))
        elif is_refusal(event.failure, serves=state.serves):
            self._verdicts.refused(adapter, key, event.failure, check.runner, runners, digest=event.digest)
        elif key.expected_digest and may_be_elsewhere(event.failure) and not state.serves:
            self._adapters.put(adapter, key, state.lacked(check, event.failure, now))
        else:
            self._adapters.put(adapter, key, state.failed(check.runner, event.failure, now))
        self._nobody_left(adapter, runners, now)
        if serving is not None:
            self._verdicts.withdraw_all(serving.digest, runners, some_may_return=some_may_return)
        return adapter.newest.ended or adapter.serving is not serving

    def _nobody_left(self, adapter: Adapter, runners: Collection[Runner], now: float) -> bool:
        """Whether the newest revision has ended: all that can be asked have refused it, or lack its bytes."""
        state = adapter.newest
        if state.asked is not None or not (state.is_refused or state.is_lacked):
            return False
        if any(state.is_awaited(one.start) for one in runners if self._may_check(one, adapter.wanted)):
            return False
        ended = state.lacked_by_all(now) if state.is_lacked else state.refused_by_all(now)
        self._adapters.put(adapter, adapter.wanted, ended)
        if ended.retry_at is not None:
            self._orders.look_at(ended.retry_at)
        self._adapters.tell(adapter)
        return True

    def _may_ask(self, adapter: Adapter, runners: Iterable[Runner], now: float) -> bool:
        """Whether a runner that is here may be asked, be it busy. If only time is missing, it is looked at then."""
        retry_at = adapter.newest.retry_at
        if retry_at is not None and retry_at > now:
            self._adapters.to_check.retry_at(retry_at, adapter)
            self._orders.look_at(retry_at)
            return False
        state, key = adapter.newest, adapter.wanted
        return state.may_be_asked(now) and any(state.is_open(one.start) for one in runners if self._may_check(one, key))

    def _ask(self, adapter: Adapter, key: RevisionKey, runner: Runner, now: float) -> EnsureAdapter:
        order, serving, spec = self._orders.number(), adapter.serving, adapter.spec
        adapter.asked_at = now
        state = adapter.state_of(key)
        self._adapters.put(adapter, key, state.ask(order, runner.start, now))
        self._orders.look_at(now + self._policy.load_retry)
        # What serves is asked for as these bytes: its source may have others by now.
        digest = serving.digest if serving is not None and serving.key == key else key.expected_digest
        source = DigestSource(spec.ref, key, max_bytes=spec.max_bytes)
        cached_only = state.source_failure is not None
        return source.ensure(order, runner.instance, digest, AdapterStage.CERTIFIED, cached_only=cached_only)

    def _at_work(self, adapter: Adapter, now: float) -> set[InstanceName]:
        """The runners that check one of its revisions, or have just said that they do"""
        return {check.runner[0] for _, check in adapter.orders() if now < check.heard + self._policy.load_retry}

    def _may_check(self, runner: Runner, key: RevisionKey) -> bool:
        serves = runner.group == key.group and runner.serves(key.base)
        return serves and runner.takes_work and self._bases.known(key.group)


def _best(
    able: Iterable[Runner], adapter: Adapter, key: RevisionKey, busy: Mapping[InstanceName, int]
) -> Runner | None:
    """First those that have not left an order unanswered, then those that tell that they have it, then those that had
    it before, then those that name their kernels, as others prove nothing, then those with the fewest checks"""
    state, digest = adapter.state_of(key), Digest(key.expected_digest)
    had = adapter.had.get(digest, ())

    def rank(runner: Runner) -> tuple[bool, bool, bool, bool, int, InstanceName]:
        instance = runner.instance
        silent = any(one.runner == runner.start for one in state.silent)
        lacks = digest not in runner.adapters.tiers
        return silent, lacks, instance not in had, runner.kernels is None, busy[instance], instance

    return min((one for one in able if state.is_open(one.start)), key=rank, default=None)
