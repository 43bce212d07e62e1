"""All adapters: which should exist, which bytes each serves, and where these come from."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

from motet.domain import BASE, Digest, ObjectName
from motet_scheduler.policy.adapters.adapter import Adapter, DigestSource, Revision
from motet_scheduler.policy.adapters.check_queue import CheckQueue
from motet_scheduler.policy.adapters.orders import Orders
from motet_scheduler.policy.adapters.revision_state import RevisionState
from motet_scheduler.policy.group_bases import GroupBases
from motet_scheduler.policy.runners import Runner
from motet_scheduler.policy.values import AdapterRef, AdapterSpec, GroupName, RevisionKey


class Adapters:
    def __init__(
        self,
        bases: GroupBases,
        orders: Orders,
        places_changed: Callable[[Digest | None], None],
    ) -> None:
        self._bases = bases
        self._orders = orders
        self.places_changed = places_changed
        """Other runners hold an adapter than before, or a load of it has ended. None: a runner has come or gone."""
        self.by_name: dict[ObjectName, Adapter] = {}
        self.to_check = CheckQueue()
        self.judged: dict[ObjectName, None] = {}
        """Those of which a state may name runners. In order, as a set would differ from process to process."""
        self.retired: dict[Digest, dict[ObjectName, DigestSource]] = {}
        """Where adapters that no longer serve a digest have it from, as long as requests use it."""
        self._retired_of: dict[ObjectName, dict[Digest, None]] = {}
        """The same by name, so that telling of an adapter does not look at all others. In order, as a set would differ
        from process to process."""
        self.gone: list[AdapterRef] = []
        """Manifests that were removed, until runners are told."""
        self._to_tell: dict[ObjectName, None] = {}
        """Adapters of which something has changed, of what the operator and gateways are told. In order, as a set
        would differ from process to process."""
        self._serving: dict[Digest, dict[ObjectName, DigestSource]] | None = None
        """The digests that names point to; None if they must be collected again."""
        self._served_in: defaultdict[GroupName, set[Digest]] = defaultdict(set)
        """The same digests, by group."""
        self._replicated: list[Adapter] | None = None
        """Those with `minReplicas`; None if they must be found again."""

    def __iter__(self) -> Iterator[Adapter]:
        yield from self.by_name.values()

    def put(self, adapter: Adapter, key: RevisionKey, state: RevisionState) -> None:
        adapter.put(key, state)
        self.to_check.note(adapter)
        if state.names_runners:
            self.judged[adapter.spec.ref.object] = None

    # --------------------------------------------------------------------------------------------- what should exist

    def state(self, specs: Iterable[AdapterSpec]) -> bool:
        """Replace the list of adapters. True if something changed."""
        wanted = {spec.ref.object: spec for spec in specs}
        # A list, not a set: the order must be the same in every process.
        gone = [self.by_name.pop(name) for name in list(self.by_name) if name not in wanted]
        changed = bool(gone)
        for name, spec in wanted.items():
            adapter = self.by_name.get(name)
            if adapter is not None and (spec is adapter.spec or spec == adapter.spec):
                continue  # mostly: each time, all are stated
            changed, self._to_tell[name] = True, None
            self._serving = self._replicated = None
            if adapter is None:
                self.by_name[name] = adapter = Adapter(spec, self._wanted(spec))
                self.to_check.note(adapter)
            else:
                self._update(adapter, spec)
        # Only now, when all names are updated: another name may serve the same bytes.
        for adapter in gone:
            self._serving = self._replicated = None
            self.gone.append(adapter.spec.ref)
            name = adapter.spec.ref.object
            self._to_tell[name] = None
            self.to_check.discard(name)
            self.judged.pop(name, None)
            self.retire(adapter)
        return changed

    def base_changed(self, group: GroupName) -> None:
        """The group may have another base model: its adapters have to be checked for that one."""
        for adapter in self.by_name.values():
            if adapter.spec.group == group:
                self._update(adapter, adapter.spec)
                self.tell(adapter)

    def _update(self, adapter: Adapter, spec: AdapterSpec) -> None:
        self._replicated = None
        self.to_check.note(adapter)
        wanted, before = self._wanted(spec), adapter.wanted
        if (before, adapter.spec.max_bytes) != (wanted, spec.max_bytes):
            # The old failure was about another revision or another bound.
            adapter.wanted, adapter.recheck_requested = wanted, False
            for key in (before, wanted):
                if (state := adapter.states.get(key)) is not None:
                    self.put(adapter, key, state.wanted_anew())
        if spec.group != adapter.spec.group:
            self.retire(adapter)
            if (serving := adapter.serving) is not None:
                adapter.serving = None
                self.put(adapter, serving.key, adapter.state_of(serving.key))
        adapter.declare(spec)

    def _wanted(self, spec: AdapterSpec) -> RevisionKey:
        return replace(spec.revision, group=spec.group, base=self._bases.of(spec.group).model.digest)

    def restore(self, spec: AdapterSpec, serving: Revision | None) -> None:
        self.by_name[spec.ref.object] = adapter = Adapter(spec, self._wanted(spec), serving)
        self.to_check.note(adapter)
        self._serving = self._replicated = None

    def serve(self, adapter: Adapter, revision: Revision | None) -> None:
        """Its name points to this revision now. None: to none."""
        before, adapter.serving = adapter.serving, revision
        if before is None and revision is not None and self._serving is not None:
            # Of thousands that come together, each would have all collected again.
            self._serving.setdefault(revision.digest, {})[adapter.spec.ref.object] = adapter.source_of(revision)
            self._served_in[adapter.spec.group].add(revision.digest)
        else:
            self._serving = None

    def retire(self, adapter: Adapter, revision: Revision | None = None) -> None:
        """Requests may still use this revision, or the one that serves."""
        revision = revision or adapter.serving
        if revision is not None:
            self.retired.setdefault(revision.digest, {})[adapter.spec.ref.object] = adapter.source_of(revision)
            self._retired_of.setdefault(adapter.spec.ref.object, {})[revision.digest] = None

    def drop(self, digest: Digest) -> dict[ObjectName, DigestSource]:
        """No request uses it any more. Returns which adapters had it, and from where."""
        self.tell_of(digest)
        sources = self.retired.pop(digest)
        for name in sources:
            del self._retired_of[name][digest]
            if not self._retired_of[name]:
                del self._retired_of[name]
        return sources

    def replaced_of(self, adapter: Adapter) -> Iterator[Digest]:
        """Revisions that requests still use."""
        for digest in self._retired_of.get(adapter.spec.ref.object, ()):
            if adapter.serving is None or digest != adapter.serving.digest:
                yield digest

    # ------------------------------------------------------------------------------------------- who serves what

    def source_of(self, digest: Digest, adapter: str = "") -> DigestSource | None:
        """Where a digest's bytes come from; None if no name and no request needs it.

        Several adapters may have the same bytes, each from a source and with a Secret of its own. With `adapter`, as
        namespace/name, only that one's counts: no tenant depends on the source of another one, or learns of it.
        """
        name = ObjectName.parse(adapter) if adapter else None
        for sources in (self.serving_sources().get(digest), self.retired.get(digest)):
            if sources and (name is None or name in sources):
                return next(iter(sources.values())) if name is None else sources[name]
        return None

    def serving_sources(self) -> dict[Digest, dict[ObjectName, DigestSource]]:
        if self._serving is None:
            self._serving, self._served_in = {}, defaultdict(set)
            for name, adapter in self.by_name.items():
                if adapter.serving is not None:
                    source = adapter.source_of(adapter.serving)
                    self._serving.setdefault(adapter.serving.digest, {})[name] = source
                    self._served_in[adapter.spec.group].add(adapter.serving.digest)
        return self._serving

    def served_in(self, group: GroupName) -> AbstractSet[Digest]:
        """The digests that names of this group point to."""
        self.serving_sources()
        return self._served_in[group]

    def replicated(self) -> list[Adapter]:
        """Those with `minReplicas`."""
        if self._replicated is None:
            self._replicated = [one for one in self.by_name.values() if one.spec.min_replicas]
        return self._replicated

    def that_serve(self, digest: Digest) -> Iterator[Adapter]:
        """Those that serve these bytes."""
        for name in self.serving_sources().get(digest, ()):
            yield self.by_name[name]

    def served_by(self, runner: Runner, digest: Digest) -> Iterator[tuple[Adapter, RevisionKey]]:
        """The adapters that serve these bytes in a runner's group, for its base model."""
        for one in [*self.that_serve(digest)]:
            serving = one.serving
            if serving is not None and serving.key.group == runner.group and runner.serves(serving.key.base):
                yield one, serving.key

    def usable(self, adapter: Adapter) -> Revision | None:
        """The revision that new requests get. One for a base model that leaves serves as long as runners that have it
        take work; then none does, until the adapter is checked for the group's own."""
        serving = adapter.serving
        if serving is None or self._bases.find(adapter.spec.group, serving.key.base) is None:
            return None
        return serving

    def rank_of(self, digest: Digest) -> int:
        """The rank of an adapter in device memory; 0 for the base model, and for an adapter that was not checked for
        this scheduler."""
        source = self.source_of(digest)
        return source.rank if source is not None else 0

    def undecided(self, group: GroupName | None = None) -> bool:
        """Whether an unknown digest may belong to an adapter that has not been checked yet. After a takeover the
        scheduler knows the adapters from the operator, but their digests only after a runner has reported them."""
        return any(
            adapter.undecided for adapter in self.by_name.values() if group is None or adapter.spec.group == group
        )

    def is_replaced(self, digest: Digest, adapter: str, group: GroupName) -> bool:
        """Whether a request wants a revision that no adapter has any more, and whose source nobody knows."""
        return digest != BASE and self.source_of(digest, adapter) is None and not self.undecided(group)

    # ------------------------------------------------------------------------------------------- who has to hear

    def tell(self, adapter: Adapter) -> None:
        self._to_tell[adapter.spec.ref.object] = None

    def tell_of(self, digest: Digest) -> None:
        self._orders.changed = True
        self.places_changed(digest)
        for name in (*self.serving_sources().get(digest, ()), *self.retired.get(digest, ())):
            self._to_tell[name] = None

    @property
    def changed(self) -> bool:
        """Whether the operator or gateways may have to be told something."""
        return bool(self._to_tell)

    def take_changed(self) -> dict[ObjectName, None]:
        """The adapters that have changed since this was called last, or have been removed since."""
        changed, self._to_tell = self._to_tell, {}
        return changed
