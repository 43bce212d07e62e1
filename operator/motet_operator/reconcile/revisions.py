"""What makes two runners interchangeable, and the name of it: a pool's revision."""

import hashlib

from motet.domain import ObjectName
from motet_operator.reconcile.view import PoolObject, RunnerTemplate


def template_of(pool: PoolObject) -> RunnerTemplate:
    spec = pool.resource.spec
    secret = spec.model.credentials_secret_ref
    return RunnerTemplate(
        group=pool.resource.group,
        model_uri=pool.model_uri,
        model_digest=spec.model.digest or "",
        engine=spec.engine,
        model_revision=spec.model.revision or "",
        model_credentials=f"{pool.resource.metadata.namespace}/{secret.name}" if secret else "",
        tpot_milliseconds=spec.tpot_milliseconds,
        volumes=tuple(spec.adapter_volumes),
        pod=spec.template,
        pod_digest=pool.pod_digest,
    )


def revision_of(pool: ObjectName, template: RunnerTemplate) -> str:
    """A short hash of the template. Another version of the operator gives the same revision, unless the runners would
    differ."""
    if template.pod_digest:
        return _short(template.pod_digest)
    # Only set fields count, so that a field added to the schema later does not restart every runner.
    content = (
        f"{pool}\n{template.group}\n{template.model_uri}\n{template.model_digest}\n"
        f"{template.engine.model_dump_json(exclude_none=True)}"
    )
    # Only what is mounted changes the pod. Who may read a volume is checked for each adapter.
    mounted = [f"{volume.claim_name}:{volume.sub_path or ''}" for volume in template.volumes]
    for name, value in (
        ("model revision", template.model_revision),
        ("model credentials", template.model_credentials),
        ("tpot", "" if template.tpot_milliseconds is None else str(template.tpot_milliseconds)),
        ("volumes", " ".join(mounted)),
        ("pod", template.pod.model_dump_json(exclude_defaults=True)),
    ):
        if value not in ("", "{}"):
            content += f"\n{name}: {value}"
    return _short(content)


def _short(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:8]
