"""Parses the API server's objects for reconcile.

An unchanged object gives the same Python object as in the last round, so reconcile evaluates only changed ones.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar, cast

from pydantic import ValidationError

from motet.domain import ObjectName
from motet.resources import API_VERSION, GROUP, LoRAAdapter, ServingPool
from motet.resources.status import Condition
from motet.sources import CLAIM, FOLDER
from motet_operator.cluster.cache import ObjectKey
from motet_operator.cluster.kinds import POOL_LABEL, Kind, Object, uid_of
from motet_operator.environment import base_of
from motet_operator.reconcile import (
    AdapterObject,
    ExistingSet,
    FailedRunner,
    PoolObject,
    RunnerDrain,
    RunnerInstance,
)
from motet_operator.reconcile.adapter_history import revisions_of
from motet_operator.reconcile.conditions import condition_of
from motet_operator.sync import UnhealthyRunner

GROUP_LABEL = f"{GROUP}/group"
REVISION_LABEL = f"{GROUP}/revision"
DRAINING = f"{GROUP}/draining-until"
DRAIN_SECONDS = f"{GROUP}/drain-seconds"
MAX_DRAIN_SECONDS = 86_400.0
"""As in a manifest. Others may write the annotation, too."""
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?")
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

CONTAINER = "runner"
"""The container of a runner's pod that is Motet's own; others are sidecars."""

LEAVING_COST = "-1000"
"""Below the default: the ReplicaSet removes this pod first."""

VOLUMES = "/var/lib/motet/volumes"
MODEL = "/var/lib/motet/model"
MODEL_CACHE = "/var/lib/motet/models"

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class Unreadable(Generic[Parsed]):
    """An object that this operator cannot read: it was stored with a newer or older schema."""

    message: str
    instead: Parsed | None = None
    """What is used instead: the last readable version, else the readable part of it; None if there is neither."""

    in_part: bool = False


class ObjectParser(Generic[Parsed]):
    """Parses each version of an object once. A version with the same content gives the same Python object.

    Versions are compared by the identity of the cached object, not by resourceVersion: a restored store uses the same
    numbers again.
    """

    def __init__(
        self,
        kind: Kind,
        read: Callable[[Object], Parsed],
        renewed: Callable[[Parsed, Object], Parsed] = lambda before, _: before,
    ) -> None:
        """`renewed` gives the earlier result with the current status."""
        self._kind, self._read, self._renewed = kind, read, renewed
        self._known: dict[ObjectKey, tuple[Object, Parsed | Unreadable[Parsed]]] = {}

    def __call__(self, objects: Mapping[ObjectKey, Object]) -> dict[ObjectKey, Parsed | Unreadable[Parsed]]:
        before, self._known = self._known, {}
        for key, it in objects.items():
            known = before.get(key)
            if known is None or known[0] is not it:
                parsed = self._once(it, known[1] if known is not None and uid_of(known[0]) == uid_of(it) else None)
                known = (it, parsed if known is None else _sharing(known[1], parsed))
            self._known[key] = known
        return {key: parsed for key, (_, parsed) in self._known.items()}

    def _once(self, it: Object, before: Parsed | Unreadable[Parsed] | None) -> Parsed | Unreadable[Parsed]:
        refused: ValidationError | None = None
        try:
            return self._read(it)
        except ValidationError as error:
            refused = error
            problem = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in problem["loc"])
            message = (
                f"{where}: {problem['msg']}. The operator and the resource definitions (CRDs) have "
                "different versions: install the same version of both, or change the field."
            )
        except Exception as error:  # one bad object must not stop the others
            message = f"the operator cannot read this object: {type(error).__name__}: {error}"
        if isinstance(before, Unreadable):
            before = None if before.in_part else before.instead
        with suppress(Exception):
            if before is not None:
                return Unreadable(message, self._renewed(before, it))
            if refused is not None and (understood := _what_is_understood(it, refused)) is not None:
                return Unreadable(message, self._read(understood), in_part=True)
        return Unreadable(message)


VARIABLES = ("spec", "template", "env")


def _what_is_understood(it: Object, error: ValidationError) -> Object | None:
    """The object without unknown fields, and without variables that an earlier version accepted, if nothing else is
    wrong with it."""
    problems = [(problem["type"], problem["loc"]) for problem in error.errors(include_url=False)]
    if any(kind != "extra_forbidden" and not (kind == "rule" and where[:-1] == VARIABLES) for kind, where in problems):
        return None
    rest = deepcopy(it)
    for _, (*path, name) in reversed(problems):  # later list items first, so that earlier indexes stay valid
        within: Any = rest
        for step in path:
            within = within[step]
        del within[name]
    return rest


def _sharing(before: Parsed | Unreadable[Parsed], now: Parsed | Unreadable[Parsed]) -> Parsed | Unreadable[Parsed]:
    if now == before:
        return before
    # Most versions differ only in their status.
    if (
        isinstance(now, PoolObject | AdapterObject)
        and isinstance(before, PoolObject | AdapterObject)
        and now.resource == before.resource
    ):
        return cast("Parsed", replace(cast("Any", now), resource=before.resource))
    return now


def readable(found: Mapping[ObjectKey, Parsed | Unreadable[Parsed]]) -> Iterable[Parsed]:
    """The parsed objects; for an unreadable one its replacement, if there is one."""
    for one in found.values():
        if not isinstance(one, Unreadable):
            yield one
        elif one.instead is not None:
            yield one.instead


def read_pool(it: Object, *, prepared: Callable[[str], bool]) -> PoolObject:
    resource = ServingPool.model_validate(_resource(it, "ServingPool"), by_alias=True, by_name=False)
    pool = PoolObject(
        resource=resource,
        model_uri=model_uri(resource),
        generation=it["metadata"].get("generation", 1),
        age=_age(it),
        namespace_prepared=prepared(resource.metadata.namespace),
    )
    return renewed_pool(pool, it)


def renewed_pool(pool: PoolObject, it: Object) -> PoolObject:
    status = it.get("status") or {}
    return replace(
        pool,
        decided=status.get("decidesForGroup", False),
        conditions=conditions_of(it),
        wanted=status.get("desiredReplicas"),
        current_revision=status.get("currentRevision", ""),
        scale_writers=scale_writers(it),
    )


def read_adapter(it: Object) -> AdapterObject:
    resource = LoRAAdapter.model_validate(_resource(it, "LoRAAdapter"), by_alias=True, by_name=False)
    adapter = AdapterObject(
        resource=resource,
        source=adapter_source(resource),
        volume=adapter_volume(resource),
        generation=it["metadata"].get("generation", 1),
        age=_age(it),
    )
    return renewed_adapter(adapter, it)


def renewed_adapter(adapter: AdapterObject, it: Object) -> AdapterObject:
    status = it.get("status") or {}
    conditions = conditions_of(it)
    accepted = condition_of(conditions, "Accepted")
    return replace(
        adapter,
        decided=accepted is not None and accepted.holds and status.get("modelName") == adapter.model,
        conditions=conditions,
        last_load=_time(status.get("lastLoadTime")),
        loaded=status.get("loadedReplicas", 0),
        revisions=revisions_of(status),
    )


def read_labels(it: Object) -> Mapping[str, str]:
    return dict(it["metadata"].get("labels") or {})


def _resource(it: Object, kind: str) -> Object:
    metadata = it["metadata"]
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "spec": it.get("spec") or {},
    }


def model_uri(pool: ServingPool) -> str:
    uri = pool.spec.model.uri
    if not uri.startswith(CLAIM.prefix):
        return uri
    _, _, path = uri.removeprefix(CLAIM.prefix).partition("/")
    return f"{FOLDER.prefix}{MODEL}/{path}".rstrip("/")


def model_claim(pool: ServingPool) -> str:
    """The claim that holds the model; empty if the model is not on a claim."""
    uri = pool.spec.model.uri
    return uri.removeprefix(CLAIM.prefix).partition("/")[0] if uri.startswith(CLAIM.prefix) else ""


def adapter_source(adapter: LoRAAdapter) -> str:
    source = adapter.spec.source
    claim = source.persistent_volume_claim
    return f"{adapter_volume(adapter)}/{claim.path}" if claim is not None else source.address or ""


def adapter_volume(adapter: LoRAAdapter) -> str:
    """The mount path of the adapter's claim; empty if it names none."""
    claim = adapter.spec.source.persistent_volume_claim
    return f"{FOLDER.prefix}{VOLUMES}/{claim.claim_name}" if claim is not None else ""


def scale_writers(pool: Object) -> tuple[str, ...]:
    return tuple(
        sorted(
            entry.get("manager", "")
            for entry in pool["metadata"].get("managedFields") or ()
            if entry.get("subresource") == "scale" and "f:replicas" in (entry.get("fieldsV1") or {}).get("f:spec", {})
        )
    )


def conditions_of(it: Object) -> tuple[Condition, ...]:
    """As last written, perhaps by another version of the operator. Invalid conditions are ignored."""
    found = []
    for each in (it.get("status") or {}).get("conditions") or ():
        with suppress(ValidationError):
            since = _time(each.get("lastTransitionTime"))
            found.append(Condition.model_validate({**each, "lastTransitionTime": since}, by_alias=True, by_name=False))
    return tuple(found)


def _time(text: object) -> datetime | None:
    """A time without a zone counts as UTC, so that all times can be compared."""
    try:
        time = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return time.replace(tzinfo=UTC) if time is not None and time.tzinfo is None else time


def _age(it: Object) -> int:
    created = _time(it["metadata"].get("creationTimestamp"))
    return int(created.timestamp()) if created is not None else 0


# ------------------------------------------------------------------------------------------------------------- runners


def pool_of(child: Object) -> ObjectName:
    metadata = child["metadata"]
    return ObjectName(metadata.get("namespace", ""), (metadata.get("labels") or {}).get(POOL_LABEL, ""))


def revision_of(child: Object) -> str:
    return str((child["metadata"].get("labels") or {}).get(REVISION_LABEL, ""))


def is_runner(pod: Object) -> bool:
    """Whether the pod belongs to a Deployment of its pool and revision. Anybody can set labels."""
    ours = f"{pool_of(pod).name}-{revision_of(pod)}-"
    return any(
        owner.get("controller") and owner["kind"] == "ReplicaSet" and owner["name"].startswith(ours)
        for owner in pod["metadata"].get("ownerReferences") or ()
    )


def is_live(pod: Object) -> bool:
    """Neither finished nor being deleted, so that its Deployment counts it."""
    return not has_finished(pod) and "deletionTimestamp" not in pod["metadata"]


def annotations_of(pod: Object) -> dict[str, str]:
    """The operator's annotations on the pod. A deletion cost with another value is not ours."""
    annotations = pod["metadata"].get("annotations") or {}
    return {
        name: value
        for name, value in annotations.items()
        if name == DRAINING or (name == DELETION_COST and value == LEAVING_COST)
    }


def drain_of_terminating_pod(pod: Object) -> RunnerDrain | None:
    """The drain of a pod that is being deleted, by anyone: it takes no work from now on."""
    metadata = pod["metadata"]
    if "deletionTimestamp" not in metadata or has_finished(pod):
        return None
    ends = [
        at for at in (_time(metadata["deletionTimestamp"]), _time(annotations_of(pod).get(DRAINING))) if at is not None
    ]
    if not ends:
        return None
    return RunnerDrain(
        instance=metadata["name"], pool=pool_of(pod), revision=revision_of(pod), deadline=min(ends), begun=True
    )


def has_failed(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") == "Failed"


def has_finished(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def read_failed(pod: Object) -> FailedRunner:
    """A pod in the phase Failed. Whoever ended it says why: the kubelet, the node, an admission plugin of the node."""
    status = pod.get("status") or {}
    containers = status.get("containerStatuses") or ()
    ended = [one for each in containers if (one := (each.get("state") or {}).get("terminated"))]
    times = [one.get("finishedAt") for one in ended]
    times += [one.get("lastTransitionTime") for one in status.get("conditions") or ()]
    said = (status.get("reason"), status.get("message"))
    if not any(said):
        said = next(((one.get("reason"), one.get("message")) for one in ended), ("Failed", ""))
    return FailedRunner(
        name=pod["metadata"]["name"],
        pool=pool_of(pod),
        reason=": ".join(part for part in said if part)[:MAX_TROUBLE_LENGTH],
        at=max((int(at.timestamp()) for one in times if (at := _time(one))), default=_age(pod)),
    )


def read_instance(pod: Object, grace: timedelta = timedelta(0)) -> RunnerInstance:
    """What the pod itself says. `with_scheduler_state` adds the scheduler's reports. `grace` is how long the pod may
    wait for a node."""
    status = pod.get("status") or {}
    ready_condition: Object = next((one for one in status.get("conditions") or () if one["type"] == "Ready"), {})
    ready, since = ready_condition.get("status") == "True", _time(ready_condition.get("lastTransitionTime"))
    containers = status.get("containerStatuses") or ()
    own = [one for one in containers if one.get("name") == CONTAINER]
    started_at = max(
        (at for one in own if (at := _time(((one.get("state") or {}).get("running") or {}).get("startedAt")))),
        default=None,
    )
    return RunnerInstance(
        name=pod["metadata"]["name"],
        pool=pool_of(pod),
        revision=revision_of(pod),
        ordinal=_age(pod),
        ready=ready,
        node=(pod.get("spec") or {}).get("nodeName") or "",
        draining_until=_time((pod["metadata"].get("annotations") or {}).get(DRAINING)),
        started_at=started_at,
        starting_until=None if ready else _starting_until(pod, since, started_at, grace),
        failures=0 if ready else sum(_deaths_in_a_row(one, since) for one in containers),
        reason="" if ready else _trouble(status, containers, since),
    )


def _starting_until(
    pod: Object, unready_since: datetime | None, started_at: datetime | None, grace: timedelta
) -> datetime | None:
    """Without a node it has the grace; on a node the time that its startup probe allows."""
    spec, created = pod.get("spec") or {}, _time(pod["metadata"].get("creationTimestamp"))
    if not spec.get("nodeName"):
        return created + grace if created is not None else None
    probe = next(
        (one.get("startupProbe") for one in spec.get("containers") or () if one.get("name") == CONTAINER), None
    )
    begun = max((at for at in (created, unready_since, started_at) if at is not None), default=None)
    if not probe or begun is None:
        return None
    return begun + timedelta(seconds=probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))


_UNREMARKABLE = ("ContainerCreating", "PodInitializing")

NOT_READY = "the container runs, but its readiness check fails"
MAX_TROUBLE_LENGTH = 900
"""Characters: enough for sentences with commands; with the pod's name still less than a condition may have."""


def _deaths_in_a_row(container: Object, unready_since: datetime | None) -> int:
    """Failures since it was last ready. Kubernetes counts all restarts, and reports since when the pod is not ready: a
    process that started before that time has been ready."""
    deaths: int = container.get("restartCount", 0)
    state, last = container.get("state") or {}, container.get("lastState") or {}
    if _was_ready(state.get("running"), unready_since):
        return 0
    return min(deaths, 1) if _was_ready(state.get("terminated") or last.get("terminated"), unready_since) else deaths


def _was_ready(run: Object | None, unready_since: datetime | None) -> bool:
    began = _time((run or {}).get("startedAt"))
    return began is not None and unready_since is not None and began < unready_since


def _trouble(status: Object, containers: Iterable[Object], unready_since: datetime | None) -> str:
    """The first reason why the pod does not serve, in Kubernetes' words."""
    for one in containers:
        running = (one.get("state") or {}).get("running")
        ended = (one.get("lastState") or {}).get("terminated")
        if ended is not None and not _was_ready(running, unready_since):
            # Our processes write a termination message if they cannot start.
            said = ended.get("message") or f"{ended.get('reason', 'Error')}, exit code {ended.get('exitCode', '?')}"
            return str(said)[:MAX_TROUBLE_LENGTH]
        if _was_ready(running, unready_since):
            return NOT_READY
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in _UNREMARKABLE:
            return ": ".join(part for part in (waiting["reason"], waiting.get("message", "")) if part)[
                :MAX_TROUBLE_LENGTH
            ]
    for one in status.get("conditions") or ():
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return f"{one.get('reason', 'Unschedulable')}: {one.get('message', '')}"[:MAX_TROUBLE_LENGTH]
    return ""


def with_scheduler_state(
    instance: RunnerInstance,
    drained: Collection[str],
    attached: Collection[str],
    unhealthy: UnhealthyRunner | None,
    grace: timedelta,
) -> RunnerInstance:
    """`grace` is how long an unhealthy runner may take to recover."""
    if unhealthy is not None and instance.started_at is not None and instance.started_at > unhealthy.since:
        unhealthy = None  # the kubelet has already restarted it
    if instance.name not in drained and instance.name not in attached and unhealthy is None:
        return instance
    return replace(
        instance,
        drained=instance.name in drained,
        attached=instance.name in attached,
        unhealthy=unhealthy.why if unhealthy is not None else "",
        replace_at=unhealthy.since + grace if unhealthy is not None else None,
    )


def with_leaving_node(instance: RunnerInstance, leaving_nodes: Collection[str]) -> RunnerInstance:
    """The instance, with `node_is_leaving` if its node is one of these."""
    return replace(instance, node_is_leaving=True) if instance.node in leaving_nodes else instance


def _environment_of(deployment: Object) -> dict[str, str]:
    """The variables of its runners."""
    pod = ((deployment.get("spec") or {}).get("template") or {}).get("spec") or {}
    own = [one for one in pod.get("containers") or () if one.get("name") == CONTAINER]
    return {each["name"]: each.get("value", "") for one in own for each in one.get("env") or ()}


def read_runner_set(deployment: Object) -> ExistingSet:
    metadata = deployment["metadata"]
    pool = pool_of(deployment)
    seconds = (metadata.get("annotations") or {}).get(DRAIN_SECONDS, "0")
    return ExistingSet(
        pool=pool,
        revision=revision_of(deployment),
        replicas=cast("int", (deployment.get("spec") or {}).get("replicas", 1)),
        base=base_of(_environment_of(deployment)),
        drain_seconds=min(float(seconds), MAX_DRAIN_SECONDS) if _NUMBER.fullmatch(seconds) else 0.0,
        trouble=next(
            (
                one.get("message") or one.get("reason", "")
                for one in (deployment.get("status") or {}).get("conditions") or ()
                if one["type"] == "ReplicaFailure" and one["status"] == "True"
            ),
            "",
        ),
    )
