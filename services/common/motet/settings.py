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
    """Where a process lives and how it talks about itself."""

    model_config = SettingsConfigDict(env_prefix="MOTET_", frozen=True, extra="ignore")

    data_dir: Path = Path("motet-data")
    """The state directory: database, caches, logs, the last catalog. One live stack per directory."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Prompts and answers are never logged, at any level."""

    log_format: Literal["console", "json"] = "json"
    """`json` for machines (the default: logs go to files and collectors), `console` for people."""

    metrics_address: str = ""
    """Where to serve /metrics, and /livez and /readyz beside it: `unix:/path` or `host:port`. Empty: nowhere."""

    metrics_names: int = Field(0, ge=0, le=10_000)
    """How many pairs of tenant and adapter figures name, the last used ones; others are counted as `other`. 0: none,
    and the labels are empty: whoever reads a figure reads its labels, and no tenant shall learn another's names. Set it
    where only the platform's own Prometheus reads (200 is a good number): each name costs about 80 series, and routers
    that look for `vllm:lora_requests_info` need it."""

    tls_dir: Path | None = None
    """A folder with `tls.crt`, `tls.key` and `ca.crt`: what listens on `host:port` then takes only peers with a
    certificate of that authority, and knows them by the name `<role>.motet.internal` in it. Files that change are read
    again. Empty: plain text. Unix sockets are always plain: only their owner may open them."""

    time_scale: float = Field(1.0, gt=0, le=1)
    """Multiplies every timer that waits for something to go wrong (heartbeats, graces, back-off). Tests run at 0.05."""

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
    """The scheduler: gateways, runners and the operator each keep one stream to it."""

    predictor_address: str = "localhost:7102"
    """The predictor: asked once a request, with a budget; never waited for beyond it."""

    supervisor_address: str = "localhost:7103"
    """The supervisor: runners report memory to it, the leading scheduler hears its advice."""


class Database(BaseSettings):
    """Where tenants, usage, length samples and predictor state are kept: one schema, `motet.store`."""

    model_config = SettingsConfigDict(env_prefix="MOTET_", frozen=True, extra="ignore")

    database_url: str = ""
    """An SQLAlchemy URL, `sqlite+aiosqlite:///path` or `postgresql+asyncpg://user@host/name`. Empty: `motet.db` in the
    state directory. The operator brings its schema up to date before it starts anything else."""

    database_wait_seconds: float = Field(60.0, ge=0)
    """How long `python -m motet.store` waits for a server that is not there yet, before it ends with the reason."""

    def url(self, process: ProcessSettings) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{process.data_dir.absolute() / 'motet.db'}"


class LeaseSettings(BaseSettings):
    """Which Lease decides who leads, and how quickly."""

    model_config = SettingsConfigDict(env_prefix="MOTET_LEASE_", frozen=True, extra="ignore", populate_by_name=True)

    name: str = ""
    """The Lease that candidates compete for. Empty: a lock file in the state directory decides, for one machine."""

    namespace: str = ""
    """The namespace of the Lease."""

    seconds: float = Field(15.0, gt=0)
    """How long a leader that has died without a word keeps the others waiting, before the time scale."""

    renew_seconds: float = Field(10.0, gt=0)
    """A leader that could not renew its Lease for this long ends itself, before the time scale."""

    retry_seconds: float = Field(2.0, gt=0)
    """Time between renewals, and between a candidate's looks at the Lease at the longest, before the time scale."""

    kubeconfig: Path | None = None
    """How to reach the cluster from outside of it. Unset: as the ServiceAccount of this pod."""

    pod_name: str = Field("", validation_alias="POD_NAME")
    """POD_NAME: the pod this is, for people who look at the Lease."""

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
