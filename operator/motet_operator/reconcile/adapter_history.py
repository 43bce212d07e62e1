"""The last revisions of an adapter: which serves, which is checked, which were replaced or refused. Pure."""

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from motet.resources.status import MAX_REVISIONS, AdapterRevision
from motet_operator.reconcile.view import AdapterObject, AdapterReport

Found = list[AdapterRevision]


def revisions_of(status: Mapping[str, Any]) -> tuple[AdapterRevision, ...]:
    """As last written, perhaps by another version of the operator. What is not valid is ignored."""
    found = []
    for each in status.get("revisions") or ():
        with suppress(ValidationError):
            found.append(AdapterRevision.model_validate(each, by_alias=True, by_name=False))
    return tuple(found[:MAX_REVISIONS])


def revisions_after(
    adapter: AdapterObject, known: AdapterReport, failure: str, now: datetime
) -> tuple[AdapterRevision, ...]:
    """The newest first. `failure`: the reason for which the newest revision is not served; empty if it is."""
    try:
        return _revisions_after(adapter, known, failure, now)
    except ValidationError:
        return adapter.revisions  # what no status can hold, such as a very long address, is left out


def _revisions_after(
    adapter: AdapterObject, known: AdapterReport, failure: str, now: datetime
) -> tuple[AdapterRevision, ...]:
    now = now.replace(microsecond=0)
    refused = "" if known.failure_passes else failure
    checked = next((one for one in adapter.revisions if one.verdict == "Checking"), None)
    found = [one for one in adapter.revisions if one.verdict != "Checking"]
    if known.serving_digest:
        found = _with_serving(found, adapter, known, now)
    elif refused and known.generation == adapter.generation:  # what has served is refused now, too
        found = [_replaced(one, set()) if one.verdict == "Serving" else one for one in found]
    live = {place.digest for place in known.replicas}
    found = [_replaced(one, live) if one.verdict in ("Draining", "Replaced") else one for one in found]
    if known.serving_digest and not refused:
        found = [one for one in found if one.verdict == "Serving" or one.digest != known.serving_digest]
    if known.generation != adapter.generation:
        return tuple(_last(found))  # the report judges what was declared before
    source = adapter.resource.spec.source
    newest = AdapterRevision(
        source=adapter.source, revision=source.revision, digest=source.digest, verdict="Checking", time=now
    )
    if refused:
        found = _with_newest(found, newest.model_copy(update={"verdict": "Refused", "reason": refused}))
    elif known.checking or known.failure_passes:
        waits = newest.model_copy(update={"reason": failure or None})
        found = [_at_the_same_time(waits, checked), *found]
    return tuple(_last(found))


def _with_serving(found: Found, adapter: AdapterObject, known: AdapterReport, now: datetime) -> Found:
    same = next((one for one in found if one.verdict == "Serving" and one.digest == known.serving_digest), None)
    if same is not None:
        came = {"source": known.source, "revision": known.source_revision or None} if known.source else {}
        return [one.model_copy(update=came) if one is same else one for one in found]  # the bytes may have moved
    serving = AdapterRevision(
        source=known.source or adapter.source,
        revision=(known.source_revision if known.source else adapter.resource.spec.source.revision) or None,
        digest=known.serving_digest,
        verdict="Serving",
        time=now,
    )
    before = [one.model_copy(update={"verdict": "Replaced"}) if one.verdict == "Serving" else one for one in found]
    return [serving, *(one for one in before if one.digest != serving.digest)]


def _replaced(one: AdapterRevision, live: set[str]) -> AdapterRevision:
    verdict = "Draining" if one.digest in live else "Replaced"
    return one if one.verdict == verdict else one.model_copy(update={"verdict": verdict})


def _with_newest(found: Found, newest: AdapterRevision) -> Found:
    """It may have been refused before, for the same reason: then it was that time."""
    same = [one for one in found if _is_again(one, newest)]
    return [_at_the_same_time(newest, same[0] if same else None), *(one for one in found if one not in same)]


def _is_again(one: AdapterRevision, newest: AdapterRevision) -> bool:
    return one.verdict == newest.verdict and (one.source, one.revision, one.digest, one.reason) == (
        newest.source,
        newest.revision,
        newest.digest,
        newest.reason,
    )


def _at_the_same_time(one: AdapterRevision, before: AdapterRevision | None) -> AdapterRevision:
    if before is None or (one.source, one.revision, one.digest) != (before.source, before.revision, before.digest):
        return one
    return one.model_copy(update={"time": before.time})


def _last(found: Found) -> Found:
    """What is live stays, and the last one that was replaced, to go back to: many in a row may be refused."""
    back = next((one for one in found if one.verdict == "Replaced"), None)
    while len(found) > MAX_REVISIONS:
        ended = [one for one in found if one.verdict in ("Replaced", "Refused") and one is not back]
        found.remove((ended or found)[-1])
    return found
