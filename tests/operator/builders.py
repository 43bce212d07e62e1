"""Views with good defaults: a test says only what it is about."""

from datetime import UTC, datetime, timedelta
from typing import Any

from motet.domain import ObjectName
from motet.resources import LoRAAdapter, ServingPool
from motet.resources.status import Condition
from motet_operator.reconcile import AdapterObject, ExistingSet, Plan, PoolObject, RunnerInstance, RunnerSet, View

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DIGEST = "sha256:" + "0" * 64


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def name(text: str) -> ObjectName:
    return ObjectName.parse(text)


def pool(text: str = "demo", *, uri: str = "file:///models/base", **spec: Any) -> PoolObject:
    full = name(text)
    conditions: tuple[Condition, ...] = spec.pop("conditions", ())
    generation: int = spec.pop("generation", 1)
    return PoolObject(
        resource=ServingPool.model_validate(
            {
                "metadata": {"name": full.name, "namespace": full.namespace},
                "spec": {"model": {"uri": uri, **spec.pop("model", {})}, **spec},
            }
        ),
        model_uri=uri,
        conditions=conditions,
        generation=generation,
    )


def adapter(text: str = "legal", *, age: int = 0, **spec: Any) -> AdapterObject:
    full = name(text)
    conditions: tuple[Condition, ...] = spec.pop("conditions", ())
    return AdapterObject(
        resource=LoRAAdapter.model_validate(
            {
                "metadata": {"name": full.name, "namespace": full.namespace},
                "spec": {"poolRef": {"name": "demo"}, "source": {"uri": f"file:///adapters/{full.name}"}, **spec},
            }
        ),
        source=f"file:///adapters/{full.name}",
        content_stamp="stamp",
        age=age,
        conditions=conditions,
    )


def instance(text: str, revision: str, *, ordinal: int = 1, pool: str = "demo", **more: Any) -> RunnerInstance:
    return RunnerInstance(
        **({"name": text, "pool": name(pool), "revision": revision, "ordinal": ordinal, "ready": True} | more)
    )


def existing(made: RunnerSet, before: ExistingSet | None = None) -> ExistingSet:
    """The set as it is read back: its name, its number and its base model are known, not what it is made of."""
    base = made.template.base if made.template is not None else before.base if before is not None else ""
    return ExistingSet(
        pool=made.pool, revision=made.revision, replicas=made.replicas, base=base, drain_seconds=made.drain_seconds
    )


def view(**parts: Any) -> View:
    return View(**({"now": NOW} | {key: tuple(v) if isinstance(v, list) else v for key, v in parts.items()}))


def sets(plan: Plan) -> dict[str, RunnerSet]:
    """By revision; for plans of one pool."""
    return {each.revision: each for each in plan.runner_sets}


def condition(conditions: tuple[Condition, ...], type_: str) -> Condition:
    (found,) = [one for one in conditions if one.type == type_]
    return found
