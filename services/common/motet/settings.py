"""Settings that every process has. Each service has its own class for its own settings, too. The docstring under each
field says what it does.

Values come from the environment: MOTET_<FIELD> here, MOTET_<SERVICE>_<FIELD> in a service's own class. No other code
reads settings from the environment. When a setting gets a new name, add the old one to `RENAMED`.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from motet.addresses import Address

RENAMED = {
    "MOTET_CLUSTER_CONDEMNED_SECONDS": "MOTET_CLUSTER_UNHEALTHY_SECONDS",
    "MOTET_OPERATOR_CONDEMNED_SECONDS": "MOTET_OPERATOR_UNHEALTHY_SECONDS",
    "MOTET_RUNNER_HUNG_SECONDS": "MOTET_RUNNER_HANG_SECONDS",
    "MOTET_SCHEDULER_PLACED_SECONDS": "MOTET_SCHEDULER_UNLISTED_SECONDS",
}
"""Old names of settings, and their new names. A process that finds an old one does not start: otherwise its value would
be ignored silently."""


class ProcessSettings(BaseSettings):
    """Where a process keeps its files, how it logs, and where it serves metrics."""

    model_config = SettingsConfigDict(env_prefix="MOTET_", frozen=True, extra="ignore")

    data_dir: Path = Path("motet-data")
    """The state directory: database, caches, logs and the last catalog. Only one running stack may use it."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged. Prompts and answers are never logged, at any level."""

    log_format: Literal["console", "json"] = "json"
    """`json` is for files and log collectors. `console` is easier to read in a terminal."""

    metrics_address: Address = ""
    """Where to serve /metrics, /livez and /readyz: `unix:/path` or `host:port`. Empty: they are not served."""

    metrics_names: int = Field(0, ge=0, le=10_000)
    """How many pairs of tenant and adapter the labels of metrics may name: the last used ones. All others are counted
    as `other`. 0: these labels are empty, so that readers of metrics do not learn the names of all tenants. Set it only
    where the platform's own Prometheus is the only reader; 200 is a good number. Each pair costs about 80 series.
    Routers that read `vllm:lora_requests_info` need this setting."""

    tls_dir: Path | None = None
    """A folder with `tls.crt`, `tls.key` and `ca.crt`, for mutual TLS. A server on `host:port` then accepts only peers
    with a TLS certificate of that authority, and reads their role from the name `<role>.motet.internal` in it.
    Changed files are read again. Empty: no TLS. Unix sockets never use TLS: only their owner may open them."""

    time_scale: float = Field(1.0, gt=0, le=1)
    """A factor on all timers that wait for a fault (heartbeats, grace periods, back-off). It is for tests: with smaller
    values Motet finds faults sooner, but treats slow processes as dead."""

    @field_validator("tls_dir", mode="before")
    @classmethod
    def _no_folder(cls, value: object) -> object:
        return value or None

    @property
    def cache_dir(self) -> Path:
        return self.data_dir / "cache"


class Addresses(BaseSettings):
    """Where the other services listen, as gRPC addresses: `unix:/path` or `host:port`. The host may be a name or an
    address, of IPv6 with or without brackets."""

    model_config = SettingsConfigDict(env_prefix="MOTET_", frozen=True, extra="ignore")

    scheduler_address: Address = "localhost:7101"
    """Where the scheduler listens. Gateways, runners and the operator each keep one stream to it."""

    predictor_address: Address = "localhost:7102"
    """Where the predictor listens. A gateway asks it once for each request, and waits at most
    MOTET_GATEWAY_PREDICT_BUDGET_SECONDS for the answer."""

    supervisor_address: Address = "localhost:7103"
    """Where the supervisor listens. Runners report their memory to it, and it reports changes to the leading
    scheduler."""


class Database(BaseSettings):
    """The database with API keys, length samples and the predictor's state. `motet.store` has its schema."""

    model_config = SettingsConfigDict(env_prefix="MOTET_", frozen=True, extra="ignore")

    database_url: str = ""
    """An SQLAlchemy URL, `sqlite+aiosqlite:///path` or `postgresql+asyncpg://user@host/name`. Empty: `motet.db` in the
    state directory. The local operator upgrades the schema of the database before it starts anything else."""

    database_wait_seconds: float = Field(60.0, ge=0)
    """How long `python -m motet.store` waits for a database server that does not answer. Then it ends and prints the
    reason."""

    def url(self, process: ProcessSettings) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{process.data_dir.absolute() / 'motet.db'}"


class LeaseSettings(BaseSettings):
    """The Lease by which schedulers or operators choose their leader, and how quickly they do it."""

    model_config = SettingsConfigDict(env_prefix="MOTET_LEASE_", frozen=True, extra="ignore", populate_by_name=True)

    name: str = ""
    """The name of the Lease. The process that holds it leads. Empty: a lock file in the state directory is used
    instead, which works on one machine only."""

    namespace: str = ""
    """The namespace of the Lease."""

    seconds: float = Field(15.0, gt=0)
    """How long the standbys wait after the leader's last renewal before one of them leads. Multiplied by
    MOTET_TIME_SCALE."""

    renew_seconds: float = Field(10.0, gt=0)
    """A leader ends its process after it could not renew its Lease for this long. Multiplied by MOTET_TIME_SCALE."""

    retry_seconds: float = Field(2.0, gt=0)
    """Time between two renewals. A standby reads the Lease at least this often. Multiplied by MOTET_TIME_SCALE."""

    kubeconfig: Path | None = None
    """A kubeconfig file, for a process outside the cluster. Unset: the ServiceAccount of this pod."""

    pod_name: str = Field("", validation_alias="POD_NAME")
    """POD_NAME: the name of this pod. It is written into the Lease for people who read it."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.retry_seconds < self.renew_seconds <= self.seconds - self.retry_seconds:
            raise ValueError(
                "MOTET_LEASE_RETRY_SECONDS must be less than MOTET_LEASE_RENEW_SECONDS, and their sum at most "
                "MOTET_LEASE_SECONDS: a leader must give up before another process may lead"
            )
        if self.name and not self.namespace:
            raise ValueError("MOTET_LEASE_NAMESPACE must be set when MOTET_LEASE_NAME is set")
        return self
