"""Settings that every process has. Each deployable derives its own class and explains each field where it stands.

Values come from the environment, as MOTET_<FIELD> here and MOTET_<SERVICE>_<FIELD> in a service's own class; nothing
else in the code reads the environment. A setting that gets another name leaves the old one in `RENAMED`.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

RENAMED = {
    "MOTET_CLUSTER_CONDEMNED_SECONDS": "MOTET_CLUSTER_UNHEALTHY_SECONDS",
    "MOTET_OPERATOR_CONDEMNED_SECONDS": "MOTET_OPERATOR_UNHEALTHY_SECONDS",
    "MOTET_RUNNER_HUNG_SECONDS": "MOTET_RUNNER_HANG_SECONDS",
    "MOTET_SCHEDULER_PLACED_SECONDS": "MOTET_SCHEDULER_UNLISTED_SECONDS",
}
"""Old names of settings and what they are called now. A process that finds an old one does not start: a value that
nothing reads must not look as if it had an effect."""


class ProcessSettings(BaseSettings):
    """Where a process keeps its files, and how it logs and shows metrics."""

    model_config = SettingsConfigDict(env_prefix="MOTET_", frozen=True, extra="ignore")

    data_dir: Path = Path("motet-data")
    """The state directory: database, caches, logs and the last catalog. Only one running stack may use it."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged. Prompts and answers are never logged, at any level."""

    log_format: Literal["console", "json"] = "json"
    """`json` is for files and log collectors, `console` is easier to read in a terminal."""

    metrics_address: str = ""
    """Where to serve /metrics, /livez and /readyz: `unix:/path` or `host:port`. Empty: they are not served."""

    metrics_names: int = Field(0, ge=0, le=10_000)
    """How many pairs of tenant and adapter the labels of metrics may name: those used last. All others are counted as
    `other`. 0: none is named and these labels are empty, so that who reads metrics does not learn the names of all
    tenants. Set it only where nobody but the platform's own Prometheus reads them; 200 is a good number. Each pair
    costs about 80 series. Routers that look for `vllm:lora_requests_info` need it."""

    tls_dir: Path | None = None
    """A folder with `tls.crt`, `tls.key` and `ca.crt`, for mutual TLS. What listens on `host:port` then takes only
    peers with a certificate of that authority, and reads their role from the name `<role>.motet.internal` in it.
    Changed files are read again. Empty: plain text. Unix sockets are always plain: only their owner may open them."""

    time_scale: float = Field(1.0, gt=0, le=1)
    """All timers that wait for a fault (heartbeats, grace periods, back-off) are multiplied by this. It is for tests:
    smaller values find faults sooner, and take slow processes for dead ones."""

    @field_validator("tls_dir", mode="before")
    @classmethod
    def _no_folder(cls, value: object) -> object:
        return value or None

    @property
    def cache_dir(self) -> Path:
        return self.data_dir / "cache"


class Addresses(BaseSettings):
    """Where the other services listen: gRPC targets, `unix:/path` or `host:port`."""

    model_config = SettingsConfigDict(env_prefix="MOTET_", frozen=True, extra="ignore")

    scheduler_address: str = "localhost:7101"
    """Where the scheduler listens. Gateways, runners and the operator each keep one stream to it."""

    predictor_address: str = "localhost:7102"
    """Where the predictor listens. A gateway asks it once for each request, and waits no longer than
    MOTET_GATEWAY_PREDICT_BUDGET_SECONDS."""

    supervisor_address: str = "localhost:7103"
    """Where the supervisor listens. Runners report their memory to it; it tells the leading scheduler what changes."""


class Database(BaseSettings):
    """Where API keys, length samples and the predictor's state are kept: one schema, `motet.store`."""

    model_config = SettingsConfigDict(env_prefix="MOTET_", frozen=True, extra="ignore")

    database_url: str = ""
    """An SQLAlchemy URL, `sqlite+aiosqlite:///path` or `postgresql+asyncpg://user@host/name`. Empty: `motet.db` in the
    state directory. The local operator brings its schema up to date before it starts anything else."""

    database_wait_seconds: float = Field(60.0, ge=0)
    """How long `python -m motet.store` waits for a database server that does not answer yet, before it ends with the
    reason."""

    def url(self, process: ProcessSettings) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{process.data_dir.absolute() / 'motet.db'}"


class LeaseSettings(BaseSettings):
    """Which Lease decides who leads, and how quickly."""

    model_config = SettingsConfigDict(env_prefix="MOTET_LEASE_", frozen=True, extra="ignore", populate_by_name=True)

    name: str = ""
    """The Lease that candidates for leadership compete for. Empty: a lock file in the state directory takes its place,
    which works on one machine only."""

    namespace: str = ""
    """The namespace of the Lease."""

    seconds: float = Field(15.0, gt=0)
    """How long the other candidates wait for a leader that has died, before one of them leads. Multiplied by
    MOTET_TIME_SCALE."""

    renew_seconds: float = Field(10.0, gt=0)
    """A leader that could not renew its Lease for this long ends itself. Multiplied by MOTET_TIME_SCALE."""

    retry_seconds: float = Field(2.0, gt=0)
    """Time between two renewals. A candidate looks at the Lease at least this often. Multiplied by MOTET_TIME_SCALE."""

    kubeconfig: Path | None = None
    """A kubeconfig file that leads to the cluster from outside. Unset: the ServiceAccount of this pod."""

    pod_name: str = Field("", validation_alias="POD_NAME")
    """POD_NAME: the name of this pod, written into the Lease for people who look at it."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.retry_seconds < self.renew_seconds <= self.seconds - self.retry_seconds:
            raise ValueError(
                "MOTET_LEASE_RETRY_SECONDS < MOTET_LEASE_RENEW_SECONDS, both together at most MOTET_LEASE_SECONDS: a "
                "leader must give up before another may take over"
            )
        if self.name and not self.namespace:
            raise ValueError("MOTET_LEASE_NAMESPACE must name the namespace of the Lease MOTET_LEASE_NAME")
        return self
