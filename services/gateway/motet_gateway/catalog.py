"""What can be asked for, by which names, and by whom. The scheduler sends it; every catalog replaces the one before."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from motet.api.v1 import common_pb2, scheduler_pb2
from motet.errors import AdapterIncompatible, InvalidRequest, ModelNotFound, Overloaded, from_proto
from motet_gateway.identity.caller import Caller
from motet_gateway.names import Names, shown


@dataclass(frozen=True, slots=True)
class Target:
    """A model name, resolved: a group and, unless the base is meant, one adapter of it."""

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
    def asset_digest(self) -> str:
        own = self.adapter.asset_digest if self.adapter is not None else ""
        return own or self.group.asset_digest

    @property
    def max_class(self) -> "common_pb2.RequestClass.ValueType":
        return self.adapter.max_class if self.adapter is not None else common_pb2.REQUEST_CLASS_UNSPECIFIED

    @property
    def fingerprint(self) -> str:
        """Changes with the weights that answer: clients see it as `system_fingerprint`."""
        digests = (self.group.base_digest, self.adapter_digest)
        return "fp_" + "_".join(digest.rpartition(":")[2][:10] for digest in digests if digest)

    def obstacle(self) -> str:
        """What a request for it still has to wait for; empty when it can be tokenised and enqueued.

        Raises the adapter's own error when no revision of it has ever passed its checks.
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
class Obstacle:
    """What a request still waits for before it can be read."""

    why: str
    group: str = ""
    """Set when it takes a runner of this group to get out of the way: one that is not there, or one that must stay."""

    runners: bool = True
    """The group has some."""


@dataclass(frozen=True)
class Catalog:
    groups: tuple[scheduler_pb2.CatalogGroup, ...] = ()
    adapters: tuple[scheduler_pb2.CatalogAdapter, ...] = ()

    @classmethod
    def of(cls, message: scheduler_pb2.Catalog) -> "Catalog":
        return cls(tuple(message.groups), tuple(message.adapters))

    @cached_property
    def _group(self) -> dict[str, scheduler_pb2.CatalogGroup]:
        return {group.group: group for group in self.groups}

    @cached_property
    def _bases(self) -> dict[str, Target]:
        return {group.served_name: Target(group, None) for group in reversed(self.groups)}

    @cached_property
    def _adapters(self) -> dict[tuple[str, str], list[Target]]:
        """By tenant and the name that clients say; one tenant may use a name on several pools."""
        found: dict[tuple[str, str], list[Target]] = {}
        for adapter in self.adapters:
            if (group := self._group.get(adapter.group)) is not None:
                found.setdefault((adapter.ref.namespace, adapter.model_name), []).append(Target(group, adapter))
        return found

    def visible(self, caller: Caller) -> Iterator[tuple[str, Target]]:
        """Every model the caller may use, under the shortest name that means it and nothing else."""
        yield from self._bases.items()
        for (tenant, name), targets in self._adapters.items():
            if tenant != caller.tenant and not caller.sees_all:
                continue
            said = name if tenant == caller.tenant else f"{tenant}/{name}"
            for target in targets:
                ambiguous = len(targets) > 1 or said in self._bases
                yield f"{_short_pool_names(target.group)[0]}:{said}" if ambiguous else said, target

    def resolve(self, name: str, caller: Caller) -> Target:
        """`name` of the caller's own tenant or `tenant/name`, either after `pool:`; or a base by its served name."""
        if (base := self._bases.get(name)) is not None:
            return base
        if targets := self._candidates(name, caller):
            if len(targets) == 1:
                return targets[0]
            choices = " or ".join(f"'{_short_pool_names(target.group)[0]}:{name}'" for target in targets)
            raise InvalidRequest(f"model '{name}' is served on several pools: say {choices}", param="model")
        raise self._not_found(name, caller)

    def _candidates(self, name: str, caller: Caller) -> list[Target]:
        if found := self._named(name, caller):
            return found
        pool, _, rest = name.rpartition(":")
        return [target for target in self._named(rest, caller) if _is_pool_of(pool, target.group)]

    def _named(self, name: str, caller: Caller) -> list[Target]:
        if own := self._adapters.get((caller.tenant, name)):
            return own
        tenant, _, rest = name.partition("/")
        return self._adapters.get((tenant, rest), []) if caller.sees_all or tenant == caller.tenant else []

    def _not_found(self, name: str, caller: Caller) -> ModelNotFound:
        if (names := self._names.get(caller)) is None:
            names = self._names[caller] = Names(visible for visible, _ in self.visible(caller))
        nearest = names.nearest(name)
        hint = f"Nearest names: {', '.join(nearest)}." if nearest else "No model is served here yet."
        return ModelNotFound(f"The model '{shown(name)}' does not exist or you may not use it. {hint}", param="model")

    @cached_property
    def _names(self) -> dict[Caller, Names]:
        """Ordered once a catalog, for those who misspell."""
        return {}

    def runner_addresses(self) -> set[str]:
        return {runner.address for group in self.groups for runner in group.runners}


def _pool_names(group: scheduler_pb2.CatalogGroup) -> Iterable[str]:
    return [*group.pools, group.group]


def _short_pool_names(group: scheduler_pb2.CatalogGroup) -> list[str]:
    return [name.rpartition("/")[2] for name in _pool_names(group)]


def _is_pool_of(name: str, group: scheduler_pb2.CatalogGroup) -> bool:
    return name in _pool_names(group) or name in _short_pool_names(group) or name == group.served_name


class CatalogBook:
    """The newest catalog, and who waits for the next one."""

    def __init__(self) -> None:
        self._current: Catalog | None = None
        self._listeners: set[Callable[[], None]] = set()

    @property
    def known(self) -> bool:
        return self._current is not None

    @property
    def current(self) -> Catalog:
        if self._current is None:
            raise Overloaded("The gateway has not heard from the scheduler yet; it will know its models in a moment.")
        return self._current

    def replace(self, catalog: Catalog) -> None:
        self._current = catalog
        for listener in list(self._listeners):
            listener()

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after every replacement, until the function that this returns is called."""
        self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)
