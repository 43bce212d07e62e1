"""Corrects the scheduler's ledger by what a runner reports.

| in our ledger | in the report | then                                                                            |
|---------------|---------------|---------------------------------------------------------------------------------|
| yes           | yes           | the runner's promise counts, less the pages that others pay for                 |
| yes           | parked        | released; the request waits to resume                                           |
| yes           | no            | released once reports have not listed it for `unsubmitted_timeout`: it never    |
|               |               | arrived, or has ended; if its gateway does not say which, it is placed again    |
| no            | yes           | recorded, unless it ended recently                                              |
| elsewhere     | yes           | recorded, since it uses pages, and cancelled, since it has left this runner     |

Elsewhere is also under another epoch. What a runner says about such a request counts for its own pages only.

What no gateway knows any more is cancelled, whether it runs or is parked, once reports have listed it for as long.
Times begin with a report. So those that are read late, all at once, decide nothing.

A report may come in parts. What is not in it is known after the last one.
"""

from collections.abc import Mapping

from motet.domain import RequestId, pages_for
from motet.promises import tokens_of
from motet.runner_info import RunnerRequest
from motet_scheduler.policy.effects import CancelAtRunner, Effect
from motet_scheduler.policy.requests import Request
from motet_scheduler.policy.runners import Listing, ParkedRequest, PlacementKey, Runner
from motet_scheduler.policy.values import Promise, SchedulerConfig


def sync_ledger(
    runner: Runner,
    listing: Listing,
    live: tuple[RunnerRequest, ...],
    *,
    more: bool = False,
    requests: Mapping[RequestId, Request],
    gateways: frozenset[str] | set[str],
    ended: Mapping[PlacementKey, float],
    unlisted: dict[PlacementKey, float],
    config: SchedulerConfig,
    now: float,
) -> list[Effect]:
    """`live` is the next part of what it lists. `more`: others follow."""
    effects: list[Effect] = []
    if any(entry.parked for entry in live):
        # Parked requests first: who pays for the pages that they shared is in the same report.
        live = tuple(sorted(live, key=lambda entry: not entry.parked))
    listing.heard += len(live)
    for entry in live:
        key = (entry.request, entry.epoch)
        if key in ended and now <= ended[key] + config.unsubmitted_timeout:
            listing.charged_to_ended += entry.pages_to_charge
            continue
        listing.keys.add(key)
        why_needless = ""
        request = requests.get(entry.request)
        if request is not None and request.runs_on(runner.identity, entry.epoch):
            unlisted.pop(key, None)
        else:
            since = listing.orphaned[key] = runner.orphaned.get(key, now)
            if request is not None:
                why_needless = "it has left this runner"
            elif entry.gateway in gateways and now - since >= config.unsubmitted_timeout:
                why_needless = "its gateway does not know it"
        if why_needless:
            effects.append(CancelAtRunner(runner.instance, entry.request, entry.epoch, why_needless))
        if entry.parked:
            if _stays_parked(runner, key, now, config):
                listing.parked.add(entry.request)
                _park(runner, entry, request, now)
            continue
        if runner.parked:
            runner.unpark(entry.request)
        shared = 0 if listing.whole else entry.shared_pages
        ledger_entry = runner.record_promise(key, entry.pages, entry.digest, now, shared=shared)
        runner.listed(ledger_entry)
        ledger_entry.owed = _owed(runner, entry) if entry.parked_times else 0
    if not more:
        _end(runner, listing, requests=requests, unlisted=unlisted, config=config, now=now)
    return effects


def _end(
    runner: Runner,
    listing: Listing,
    *,
    requests: Mapping[RequestId, Request],
    unlisted: dict[PlacementKey, float],
    config: SchedulerConfig,
    now: float,
) -> None:
    """It has listed all."""
    runner.orphaned = listing.orphaned
    runner.ledger.charge_others(listing.charged_to_ended)
    for key in [key for key in runner.entries if key not in listing.keys]:
        ledger_entry = runner.entries[key]
        if ledger_entry.missing_since is None:
            ledger_entry.missing_since = now
        if now - ledger_entry.missing_since >= config.unsubmitted_timeout:
            runner.release_promise(key)
            _note_unlisted(runner, key, requests, unlisted, now)
    for name in [name for name in runner.parked if name not in listing.parked]:
        _note_unlisted(runner, (name, runner.parked[name].epoch), requests, unlisted, now)
        runner.unpark(name)


def _owed(runner: Runner, entry: RunnerRequest) -> int:
    """Pages that a request which came back will take. By a forecast, only those of its tokens are sure."""
    capacity = runner.capacity
    pages = entry.pages
    if capacity.by_forecast:
        pages = min(pages, pages_for(entry.prompt_tokens + entry.output_tokens, capacity.page_tokens))
    return max(0, pages - entry.pages_used)


def _note_unlisted(
    runner: Runner,
    key: PlacementKey,
    requests: Mapping[RequestId, Request],
    unlisted: dict[PlacementKey, float],
    now: float,
) -> None:
    request = requests.get(key[0])
    if request is not None and request.runs_on(runner.identity, key[1]):
        unlisted.setdefault(key, now)


def _stays_parked(runner: Runner, key: PlacementKey, now: float, config: SchedulerConfig) -> bool:
    """Whether a parked request still waits; False while it resumes."""
    ledger_entry = runner.entries.get(key)
    if ledger_entry is None or not ledger_entry.readmitted:
        return True
    ledger_entry.missing_since = None
    return now - ledger_entry.since > config.unsubmitted_timeout


def _park(runner: Runner, entry: RunnerRequest, request: Request | None, now: float) -> None:
    known = runner.parked.get(entry.request)
    if known is not None and known.epoch == entry.epoch and known.wanted.number in (0, entry.promise_number):
        return
    pages = max(entry.pages, entry.pages_used, 1)
    asked_at = request.asked_at if request is not None else now
    wanted = Promise(pages, tokens_of(pages, runner.capacity.page_tokens), number=entry.promise_number)
    runner.park(entry.request, ParkedRequest(entry.epoch, wanted, entry.digest, (int(entry.request_class), asked_at)))
