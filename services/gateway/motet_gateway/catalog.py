"""Which models there are, under which names, and who may use them. The scheduler sends a catalog, then its changes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.chat_formats import ChatFormats
from motet.domain import ObjectName
from motet.errors import AdapterIncompatible, InvalidRequest, ModelNotFound, Overloaded, from_proto
from motet_gateway.asset_searches import Owner
from motet_gateway.identity.caller import Caller
from motet_gateway.model_not_found import NameIndex, model_not_found

EVERYBODY = "*"
"""In a list of namespaces: all of them."""

_NAMES_KEPT = 256
"""How many tenants have their sorted names cached."""

_SHARED_NAMES_KEPT = 16
"""How many sets of groups have their shared names cached. Each may have many names."""


Weights = tuple[str, str]
"""The digests of a base model and of an adapter's revision; the second is empty for the base model alone."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a model name means: a group and one of its adapters, or the base model."""

    group: scheduler_pb2.CatalogGroup
    adapter: scheduler_pb2.CatalogAdapter | None

    @property
    def adapter_name(self) -> str:
        """namespace/name; empty for the base model."""
        return f"{self.adapter.ref.namespace}/{self.adapter.ref.name}" if self.adapter is not None else ""

    @property
    def adapter_digest(self) -> str:
        return self.adapter.digest if self.adapter is not None else ""

    @property
    def base_digest(self) -> str:
        """While its group changes to another base model, an adapter keeps the old one until it is checked for the new
        one."""
        own = self.adapter.base_digest if self.adapter is not None else ""
        return own or self.group.base_digest

    @property
    def weights(self) -> Weights:
        return self.base_digest, self.adapter_digest

    @property
    def asset_digest(self) -> str:
        own = self.adapter.asset_digest if self.adapter is not None else ""
        return own or self.group.asset_digest

    @property
    def template_digest(self) -> str:
        """Of the adapter's own chat template; empty: the base model's is used. It comes with the adapter's digest in
        one entry of the catalog. So a prompt is rendered with the template of the weights that it is enqueued for."""
        return self.adapter.template_digest if self.adapter is not None else ""

    @property
    def is_in_memory(self) -> bool:
        """Whether a runner has its adapter there"""
        return self.adapter is not None and self.adapter.state == scheduler_pb2.ADAPTER_READINESS_READY

    @property
    def max_class(self) -> "common_pb2.RequestClass.ValueType":
        return self.adapter.max_class if self.adapter is not None else common_pb2.REQUEST_CLASS_UNSPECIFIED

    def max_class_of(self, tenant: str) -> "common_pb2.RequestClass.ValueType":
        """What the pool grants to the tenant that asks."""
        classes = self.group.max_classes
        return classes.get(tenant) or classes.get(EVERYBODY) or common_pb2.REQUEST_CLASS_UNSPECIFIED

    @property
    def declared_formats(self) -> ChatFormats:
        """By its pool and its adapter."""
        of_group = ChatFormats.from_proto(self.group.chat)
        return of_group if self.adapter is None else ChatFormats.from_proto(self.adapter.chat).over(of_group)

    @property
    def fingerprint(self) -> str:
        """Changes when the weights change. Clients see it as `system_fingerprint`."""
        return "fp_" + "_".join(digest.rpartition(":")[2][:10] for digest in self.weights if digest)

    def is_owned_by(self, caller: Caller) -> bool:
        """A caller who may use an adapter but does not own it does not see its source."""
        return self.adapter is None or caller.sees_all or self.adapter.ref.namespace == caller.tenant

    def not_ready_reason(self) -> str:
        """What a request for it has to wait for; empty if it can be tokenised and enqueued.

        Raises the adapter's own error if no revision of it has ever passed its checks.
        """
        if self.adapter is not None and not self.adapter.digest:
            if self.adapter.state == scheduler_pb2.ADAPTER_READINESS_FAILED:
                if self.adapter.HasField("failure"):
                    raise from_proto(self.adapter.failure)
                raise AdapterIncompatible(f"adapter {self.adapter_name} failed its checks")
            if self.group.runners:
                return f"checking adapter {self.adapter_name}"
        if not self.group.asset_digest or (self.adapter is not None and not self.adapter.digest):
            return f"waiting for a runner of {self.group.served_name}"
        return ""


@dataclass(frozen=True, slots=True)
class NotReadyReason:
    """What a request waits for before the gateway can tokenise it."""

    why: str
    group: str = ""
    """Set if a runner of this group has to start or to stay before the request can go on."""

    runners: bool = True
    """Whether the group has runners."""

    soon: bool = False
    """Whether it takes a moment, as after a start: the scheduler has to answer, or a runner to send the tokenizer."""

    template: tuple[str, Owner] | None = None
    """The digest of the chat template that is fetched, and whose it is"""


@dataclass(frozen=True)
class Catalog:
    groups: tuple[scheduler_pb2.CatalogGroup, ...] = ()
    adapters: tuple[scheduler_pb2.CatalogAdapter, ...] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict)
    """The uids of all namespaces that exist, by name. Empty: the operator does not say."""
    revision: tuple[int, int] = (0, 0)
    """The scheduler's term, and the number of the catalog."""

    @classmethod
    def of(cls, message: scheduler_pb2.Catalog) -> "Catalog":
        return cls(
            tuple(message.groups),
            tuple(message.adapters),
            {namespace.name: namespace.uid for namespace in message.namespaces},
            (message.term, message.revision),
        )

    def changed(self, changes: scheduler_pb2.CatalogChanges) -> "Catalog":
        before = (changes.before_term, changes.before)
        if before != self.revision:
            raise InvalidRequest(
                f"these are changes of catalog {before}, but this gateway has {self.revision}", param="before"
            )
        by_manifest = self._by_manifest | _by_manifest(changes.adapters)
        for ref in changes.removed:
            by_manifest.pop((ref.namespace, ref.name), None)
        adapters = tuple(by_manifest.values())
        catalog = Catalog(tuple(changes.groups), adapters, self.namespaces, (changes.term, changes.revision))
        vars(catalog)["_by_manifest"] = by_manifest  # thousands may change one by one: no change looks at the others
        return catalog

    @cached_property
    def _by_manifest(self) -> dict[tuple[str, str], scheduler_pb2.CatalogAdapter]:
        return _by_manifest(self.adapters)

    @cached_property
    def _group(self) -> dict[str, scheduler_pb2.CatalogGroup]:
        return {group.group: group for group in self.groups}

    @cached_property
    def _admitted(self) -> dict[str, frozenset[str]]:
        """By group: the tenants that its pools admit."""
        return {group.group: frozenset(group.tenants) for group in self.groups}

    @cached_property
    def _bases(self) -> dict[str, list[Target]]:
        found: dict[str, list[Target]] = {}
        for group in self.groups:
            found.setdefault(group.served_name, []).append(Target(group, None))
        return found

    @cached_property
    def _adapters(self) -> dict[tuple[str, str], list[Target]]:
        """By tenant and name. A tenant may use one name on several pools."""
        found: dict[tuple[str, str], list[Target]] = {}
        for adapter in self.adapters:
            if (group := self._group.get(adapter.group)) is not None:
                found.setdefault((adapter.ref.namespace, adapter.model_name), []).append(Target(group, adapter))
        return found

    @cached_property
    def _names_for(self) -> dict[str, list[tuple[str, str]]]:
        """By tenant: names of its own adapters and of those shared with it; under "*" those shared with all. So a
        listing costs nothing for adapters that its caller may not use."""
        found: dict[str, dict[tuple[str, str], None]] = {}
        for name, targets in self._adapters.items():
            for tenant in {name[0], *(tenant for target in targets for tenant in _shared_with(target))}:
                found.setdefault(tenant, {})[name] = None
        return {tenant: list(names) for tenant, names in found.items()}

    def _may_use(self, target: Target, caller: Caller) -> bool:
        if caller.sees_all:
            return True
        if (adapter := target.adapter) is not None:
            if adapter.ref.namespace == caller.tenant:
                return True  # the catalog has no adapters that their pool does not admit
            if caller.tenant not in adapter.share and EVERYBODY not in adapter.share:
                return False
        return self._admits(target.group.group, caller)

    def _admits(self, group: str, caller: Caller) -> bool:
        admitted = self._admitted[group]
        return caller.tenant in admitted or EVERYBODY in admitted

    def _base(self, name: str, caller: Caller) -> Target | None:
        """The first one of this name that the caller may use."""
        return next((target for target in self._bases.get(name, ()) if self._may_use(target, caller)), None)

    def _of(self, tenant: str, name: str, caller: Caller) -> list[Target]:
        return [target for target in self._adapters.get((tenant, name), ()) if self._may_use(target, caller)]

    def bases(self, caller: Caller) -> list[Target]:
        """The base models that the caller may use."""
        return [base for name in self._bases if (base := self._base(name, caller)) is not None]

    def only_base(self, caller: Caller) -> str:
        """The name of the model that is meant where none is named. Raises InvalidRequest if there are several."""
        bases = self.bases(caller)
        if len(bases) != 1:
            raise InvalidRequest("model: this field is required unless exactly one base model is served", param="model")
        return bases[0].group.served_name

    def visible(self, caller: Caller) -> Iterator[tuple[str, Target]]:
        """Every model that the caller may use, under its shortest unambiguous name."""
        for base in self.bases(caller):
            yield base.group.served_name, base
        if caller.sees_all:
            yield from self._client_names(self._adapters, caller)
        else:
            names = dict.fromkeys([*self._names_for.get(caller.tenant, ()), *self._names_for.get(EVERYBODY, ())])
            yield from self._client_names(names, caller)

    def _client_names(self, names: Iterable[tuple[str, str]], caller: Caller) -> Iterator[tuple[str, Target]]:
        for tenant, name in names:
            said = name if tenant == caller.tenant else f"{tenant}/{name}"
            targets = self._of(tenant, name, caller)
            ambiguous = len(targets) > 1 or self._base(said, caller) is not None
            for target in targets:
                yield f"{_pool_prefix(target, targets)}:{said}" if ambiguous else said, target

    def adapter(self, name: ObjectName) -> Target | None:
        """The adapter of this tenant and name; of several pools' the first"""
        return next(iter(self._adapters.get(name, ())), None)

    def resolve(self, name: str, caller: Caller) -> Target:
        """The model of this name: `name` of the caller's own tenant, `tenant/name`, or a base model's served name. The
        first two may have the prefix `pool:`.

        Models that the caller may not use are treated as if they did not exist, also in error messages.
        """
        if (base := self._base(name, caller)) is not None:
            return base
        if targets := self._candidates(name, caller):
            if len(targets) == 1:
                return targets[0]
            choices = " or ".join(f"'{_pool_prefix(target, targets)}:{name}'" for target in targets)
            raise InvalidRequest(f"model '{name}' is served by several pools; use {choices}", param="model")
        raise self._not_found(name, caller)

    def _candidates(self, name: str, caller: Caller) -> list[Target]:
        if found := self._named(name, caller):
            return found
        pool, _, rest = name.rpartition(":")
        found = self._named(rest, caller)
        # The full name first, since pools of several namespaces may have the same short name.
        exactly = [target for target in found if pool in _pool_names(target.group)]
        return exactly or [target for target in found if _is_pool_of(pool, target.group)]

    def _named(self, name: str, caller: Caller) -> list[Target]:
        if own := self._of(caller.tenant, name, caller):
            return own
        tenant, _, rest = name.partition("/")
        return self._of(tenant, rest, caller)

    def _not_found(self, name: str, caller: Caller) -> ModelNotFound:
        shared = () if caller.sees_all else (self._shared_names(caller),)
        return model_not_found(name, self._own_names(caller), *shared)

    def _own_names(self, caller: Caller) -> NameIndex:
        """The caller's own names and those shared with its tenant; all names if the caller sees all."""
        who = (caller.tenant, caller.sees_all)
        if (names := self._own.get(who)) is None:
            if len(self._own) >= _NAMES_KEPT:
                self._own.clear()
            own = self._client_names(self._names_for.get(caller.tenant, ()), caller)
            found = self.visible(caller) if caller.sees_all else own
            names = self._own[who] = NameIndex(said for said, _ in found)
        return names

    def _shared_names(self, caller: Caller) -> NameIndex:
        """Names of base models and of adapters shared with all, in their long form. They are the same for all tenants
        that the same groups admit."""
        groups = tuple(group for group in self.groups if self._admits(group.group, caller))
        who = frozenset(group.group for group in groups)
        if (names := self._shared.get(who)) is None:
            if len(self._shared) >= _SHARED_NAMES_KEPT:
                self._shared.clear()
            # A catalog without all other adapters, so that their names can't appear.
            alone = Catalog(groups, tuple(adapter for adapter in self.adapters if EVERYBODY in adapter.share))
            names = self._shared[who] = NameIndex(said for said, _ in alone.visible(Caller("", sees_all=True)))
        return names

    @cached_property
    def _own(self) -> dict[tuple[str, bool], NameIndex]:
        """For suggestions: sorted once per catalog."""
        return {}

    @cached_property
    def _shared(self) -> dict[frozenset[str], NameIndex]:
        """By the groups that admit the caller."""
        return {}

    def runner_addresses(self) -> list[str]:
        return [runner.address for group in self.groups for runner in group.runners]


def _pool_names(group: scheduler_pb2.CatalogGroup) -> Iterable[str]:
    return [*group.pools, group.group]


def _short_pool_names(group: scheduler_pb2.CatalogGroup) -> list[str]:
    return [name.rpartition("/")[2] for name in _pool_names(group)]


def _by_manifest(
    adapters: Iterable[scheduler_pb2.CatalogAdapter],
) -> dict[tuple[str, str], scheduler_pb2.CatalogAdapter]:
    return {(one.ref.namespace, one.ref.name): one for one in adapters}


def _shared_with(target: Target) -> Iterable[str]:
    return target.adapter.share if target.adapter is not None else ()


def _pool_prefix(target: Target, among: Iterable[Target]) -> str:
    """The shortest unambiguous name of the target's pool."""
    short = _short_pool_names(target.group)[0]
    alike = [other for other in among if _is_pool_of(short, other.group)]
    return short if len(alike) == 1 else next(iter(_pool_names(target.group)))


def _is_pool_of(name: str, group: scheduler_pb2.CatalogGroup) -> bool:
    return name in _pool_names(group) or name in _short_pool_names(group) or name == group.served_name


class CurrentCatalog:
    """The newest catalog, and the listeners that are called for the next one."""

    def __init__(self) -> None:
        self._current: Catalog | None = None
        self._listeners: set[Callable[[], None]] = set()

    @property
    def known(self) -> bool:
        return self._current is not None

    @property
    def current(self) -> Catalog:
        if self._current is None:
            raise Overloaded(
                "The scheduler has not sent the list of models to this gateway yet. Try again in a moment."
            )
        return self._current

    def replace(self, catalog: Catalog) -> None:
        self._current = catalog
        for listener in list(self._listeners):
            listener()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every replacement, until the function that this returns is called."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)
