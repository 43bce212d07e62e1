"""What runners tell of the adapters that they hold, and whom it concerns."""

from collections.abc import Iterable, Mapping

from motet.domain import Digest
from motet.runner_info import Tier
from motet_scheduler.policy.adapters.adapters import Adapters
from motet_scheduler.policy.events import AdapterStateChanged
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import AdapterStage, GroupName

_TIERS = {AdapterStage.CERTIFIED: Tier.DISK, AdapterStage.HOST: Tier.HOST, AdapterStage.DEVICE: Tier.DEVICE}


class Residency:
    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self.rates: dict[GroupName, float] = {}
        """Bytes per second of the last fetch that has lasted."""
        self.loaded: dict[tuple[GroupName, Digest], None] = {}
        """What has come to a device since `take_loaded`."""

    def reported(self, runner: Runner, tiers: Mapping[Digest, Tier]) -> None:
        """Replace what is known of the adapters that a runner holds."""
        self._moved(runner, runner.adapters.replace(tiers))

    def changed(self, runner: Runner, gone: Iterable[Digest], tiers: Mapping[Digest, Tier]) -> None:
        """Some have gone from a runner, and others have come, or are at another tier."""
        self._moved(runner, runner.adapters.change(gone, tiers))

    def stage_told(self, runner: Runner, digest: Digest, stage: AdapterStage) -> None:
        """Between two reports, an adapter has come to a runner's device, or gone from there to its disk. Only of what
        serves: nothing else bounds what a runner names until its next report."""
        tier = _TIERS.get(stage)
        if tier is not None and digest in self._adapters.serving_sources() and runner.adapters.put(digest, tier):
            self._moved(runner, [digest])

    def load_reported(self, runner: Runner, event: AdapterStateChanged) -> None:
        """A runner has reported on a fetch that it was ordered to make for its device."""
        if event.failure is not None or event.stage > AdapterStage.NONE:
            self._adapters.places_changed(event.digest)
        elif (fetch := runner.adapters.fetches.get(event.digest)) is not None and fetch.rate > 0:
            self.rates[runner.group] = fetch.rate

    def connection_changed(self, runner: Runner) -> None:
        """What a runner holds counts for gateways only while it is connected."""
        self._adapters.places_changed(None)
        for digest in runner.adapters.tiers:
            self._adapters.tell_of(digest)

    def take_loaded(self) -> dict[tuple[GroupName, Digest], None]:
        """What has come to a device since this was called last."""
        loaded, self.loaded = self.loaded, {}
        return loaded

    def _moved(self, runner: Runner, digests: Iterable[Digest]) -> None:
        for digest in digests:
            if runner.adapters.tiers.get(digest) is Tier.DEVICE:
                self.loaded[runner.group, digest] = None
            self._adapters.tell_of(digest)
