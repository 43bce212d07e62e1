"""The operator's own settings: MOTET_OPERATOR_<FIELD> locally, where `motet up` sets them, and MOTET_CLUSTER_<FIELD> on
a cluster, where the chart does."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What the local operator runs, and where the gateway listens."""

    model_config = SettingsConfigDict(env_prefix="MOTET_OPERATOR_", frozen=True, extra="ignore")

    manifests: Path
    """The file or folder with the manifests. Changes are noticed."""

    runners: int | None = Field(None, ge=0)
    """Replaces the number of replicas of every pool (`--runners`)."""

    host: str = "127.0.0.1"
    """Where the gateway listens; `motet up` takes it from MOTET_HOST."""

    port: int = Field(8000, ge=1, le=65535)
    """The gateway's port."""

    quiet_seconds: float = Field(0.3, ge=0)
    """Manifests and adapter folders are read when nothing in them has changed for this long, so that files that are
    still being copied are not read (debounce). If they change all the time, they are read each time 100 times as long
    is over."""

    poll_seconds: float = Field(0.5, gt=0)
    """How often files are checked for changes. Thousands of folders are looked at less often, at least every few
    seconds, and thousands of manifests at least every second: each takes a hundredth of a core."""

    unhealthy_seconds: float = Field(5.0, ge=0)
    """How long a runner that hangs or sends no reports may take to recover. Then its process is killed and started
    again. Multiplied by MOTET_TIME_SCALE."""

    restart_seconds: float = Field(2.0, ge=0)
    """How long a runner that died waits before it is started again, while another runner of its pool is ready: that one
    takes over its requests and needs the cores. Multiplied by MOTET_TIME_SCALE."""

    startup_seconds: float = Field(1200.0, ge=0)
    """How long a runner may take to load its model. Until then, other runners of its pool that hang are not replaced,
    unless it fails again and again. Multiplied by MOTET_TIME_SCALE."""

    silent_seconds: float = Field(30.0, ge=0)
    """When a process answers none of five health checks in a row within this time, it is killed and started again: it
    was stopped, or its event loop hangs. Normal processes can be silent for some seconds on a loaded machine, so
    MOTET_TIME_SCALE does not change this. A process that has not answered since its start has six times as long. A
    gateway, scheduler, predictor or supervisor that SIGSTOP has stopped is replaced after three to seven seconds. 0:
    never, for example for a process in a debugger."""

    stop_grace_seconds: float = Field(10.0, ge=0)
    """How long a process may take to end after SIGTERM, before it is killed."""

    gateway_drain_seconds: float = Field(3.0, ge=0)
    """How long running answers may go on when the whole stack stops."""


class ClusterSettings(BaseSettings):
    """The operator on a cluster."""

    model_config = SettingsConfigDict(env_prefix="MOTET_CLUSTER_", frozen=True, extra="ignore")

    pool_namespaces: tuple[str, ...] = ("motet-pools",)
    """The namespaces where ServingPools may run, as a JSON list. The operator looks at Deployments and Pods only
    there."""

    operator_class: str = ""
    """Which ServingPools and LoRAAdapters this operator handles: those whose label `motet.dev/operator-class` has this
    value. Empty: those without the label. Operators of different classes run side by side."""

    runner_template: Path = Path("/etc/motet/runner/template.yaml")
    """A file with a pod template with a container `runner`, and sidecars: what every runner pod has, whatever its pool
    says. It is read once, at the start. A changed template is a new revision of every pool whose pods it changes."""

    rolling_pools: int = Field(3, ge=1)
    """How many pools may roll out a new revision at once. The others keep their runners until it is their turn."""

    rollout_seconds: float = Field(30.0, ge=0)
    """The first three changes of a pool's runners are rolled out as they come. If the pool goes on changing, it begins
    one rollout in this time, to its newest state. Going back to what most of its runners are does not count. 0: every
    change is rolled out at once. Multiplied by MOTET_TIME_SCALE."""

    kubeconfig: Path | None = None
    """A kubeconfig file that leads to the API server from outside the cluster. Unset: the token and address that every
    pod has."""

    writes_per_second: float = Field(200.0, gt=0)
    """The most requests to the API server per second, on average. If it answers 429 the operator waits as long as it
    says."""

    write_burst: float = Field(400.0, ge=1)
    """The most requests to the API server at once after a quiet time."""

    writers: int = Field(16, ge=1, le=256)
    """The most writes to the API server that run at the same time."""

    resync_seconds: float = Field(300.0, gt=0)
    """How often every kind is listed and compared with what the watches have brought. A lost event has an effect for at
    most this long. Multiplied by MOTET_TIME_SCALE."""

    cordon_seconds: float = Field(10.0, gt=0)
    """How often the operator looks for nodes that are to be emptied, to move their runners: it lists cordoned nodes,
    and reads the taints of each node that has a runner. It does not while there are no runners. Multiplied by
    MOTET_TIME_SCALE."""

    leaving_taints: tuple[str, ...] = (
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "cloud.google.com/impending-node-termination",
    )
    """Keys of taints that mean that a node is to be emptied, as a JSON list. Runners leave such a node as they leave a
    cordoned one. Empty: only cordoned nodes count, and nodes are not read one by one."""

    unhealthy_seconds: float = Field(120.0, ge=0)
    """How long a runner that hangs or sends no reports may take to recover. Then its pod is deleted and made again,
    without the model and the adapters that it has fetched. Before that its liveness probe restarts its container, which
    keeps them: this takes longer than the probe. Multiplied by MOTET_TIME_SCALE."""

    replaced_at_once: int = Field(1, ge=1)
    """How many pods of a pool may be deleted for this reason at the same time: the next one waits until the runners of
    the pool that start are ready. If many seem to hang at once, the cause is seldom in the runners."""

    residency_seconds: float = Field(60.0, ge=0)
    """How often statuses follow which runners have an adapter in device memory, and how many slots are used. Only an
    adapter that gets runners that it asks for has them in its status at once. Multiplied by MOTET_TIME_SCALE."""

    vanished_seconds: float = Field(600.0, ge=0)
    """How long the operator keeps serving what it last knew when all objects of a kind disappear at once, for example
    because the definition was deleted. Multiplied by MOTET_TIME_SCALE."""

    events_per_second: float = Field(5.0, gt=0)
    """The most Kubernetes Events per second, on average; five times as many at once. More are dropped: the status has
    everything."""

    request_seconds: float = Field(15.0, gt=0)
    """How long the API server may take for one answer."""
