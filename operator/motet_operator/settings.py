"""The operator's own settings: MOTET_OPERATOR_<FIELD> locally, where `motet up` sets them, and MOTET_CLUSTER_<FIELD> on
a cluster, where the chart does."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What to run, and where the gateway shall listen."""

    model_config = SettingsConfigDict(env_prefix="MOTET_OPERATOR_", frozen=True, extra="ignore")

    manifests: Path
    """The folder, or the file, with the manifests. It is watched."""

    runners: int | None = Field(None, ge=0)
    """Replaces every pool's replicas (`--runners`)."""

    host: str = "127.0.0.1"
    """Where the gateway listens; MOTET_HOST of `motet up`."""

    port: int = Field(8000, ge=1, le=65535)
    """The gateway's port."""

    quiet_seconds: float = Field(0.3, ge=0)
    """Manifests and adapter folders are read once they have not changed for this long: copying takes a while."""

    poll_seconds: float = Field(1.0, gt=0)
    """How often files are looked at without being told of a change: notifications do not work everywhere."""

    unhealthy_seconds: float = Field(5.0, ge=0)
    """A runner that hangs or is silent may come back by itself for so long; then its process is killed and started
    again. Multiplied by MOTET_TIME_SCALE."""

    silent_seconds: float = Field(30.0, ge=0)
    """A process that answers none of five questions in a row in so long is killed and started again: it was stopped, or
    its event loop hangs, and SIGTERM would mean nothing to it. Honest ones are silent for some seconds on a loaded
    machine, whatever MOTET_TIME_SCALE says. One that has not answered yet since its start has six times as long. 0:
    never, as for a process under a debugger."""

    stop_grace_seconds: float = Field(10.0, ge=0)
    """How long a process may take to end before it is killed."""

    gateway_drain_seconds: float = Field(3.0, ge=0)
    """How long answers under way may go on when everything stops."""


class ClusterSettings(BaseSettings):
    """The operator on a cluster."""

    model_config = SettingsConfigDict(env_prefix="MOTET_CLUSTER_", frozen=True, extra="ignore")

    pool_namespaces: tuple[str, ...] = ("motet-pools",)
    """Where ServingPools may run, as a JSON list. Only there the operator looks at Deployments and Pods."""

    runner_template: Path = Path("/etc/motet/runner/template.yaml")
    """A pod template with exactly one container, `runner`: what every runner pod has whatever its pool says. It is read
    once, at the start; another one is a new revision of every pool whose pods would be others."""

    rolling_pools: int = Field(3, ge=1)
    """Pools that may be on their way to another revision at once. The others keep the runners that they have until it
    is their turn."""

    rollout_seconds: float = Field(30.0, ge=0)
    """Three changes of a pool's runners are rolled out as they come; one that goes on changing begins to roll once in
    so long, to what it is by then. Going back to what most of its runners are is no change. 0: every change at once.
    Multiplied by MOTET_TIME_SCALE."""

    kubeconfig: Path | None = None
    """How to reach the API server from outside a cluster. Absent: by the token and address that every pod gets."""

    writes_per_second: float = Field(200.0, gt=0)
    """Requests to the API server a second, in the long run. An answer of 429 is obeyed besides."""

    write_burst: float = Field(400.0, ge=1)
    """Requests that may go out at once after a quiet time."""

    writers: int = Field(16, ge=1, le=256)
    """Requests under way at once."""

    resync_seconds: float = Field(300.0, gt=0)
    """How often every kind is listed and compared with what the watches have said: the longest that a lost event can
    matter. Multiplied by MOTET_TIME_SCALE."""

    cordon_seconds: float = Field(10.0, gt=0)
    """How often nodes that are to be emptied are asked for, whose runners then move elsewhere: one list of those that
    are cordoned, and each node with a runner for its taints. Not while there are no runners. Multiplied by
    MOTET_TIME_SCALE."""

    leaving_taints: tuple[str, ...] = (
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "cloud.google.com/impending-node-termination",
    )
    """Keys of taints that say that a node is to be emptied, as a JSON list: runners leave it as they leave a cordoned
    one. Empty: only a cordon counts, and nodes are not asked for one by one."""

    takeover_seconds: float = Field(3.0, ge=0)
    """How long a new leader leaves the status of adapters and pools alone that the scheduler has not yet told it of.
    Multiplied by MOTET_TIME_SCALE."""

    unhealthy_seconds: float = Field(5.0, ge=0)
    """A runner that hangs or is silent may come back by itself for so long; then its pod is deleted and made again.
    Multiplied by MOTET_TIME_SCALE."""

    vanished_seconds: float = Field(600.0, ge=0)
    """How long serving goes on with what was last known when a whole kind disappears, as when its definition has been
    deleted. Multiplied by MOTET_TIME_SCALE."""

    events_per_second: float = Field(5.0, gt=0)
    """Kubernetes Events a second, in the long run; five times as many at once. More are dropped: status tells all."""

    request_seconds: float = Field(15.0, gt=0)
    """How long one answer of the API server may take."""
