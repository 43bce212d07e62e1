"""The local operator's own settings, MOTET_OPERATOR_<FIELD> in the environment; `motet up` sets them."""

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

    condemned_seconds: float = Field(5.0, ge=0)
    """A runner that hangs or is silent may come back by itself for so long; then its process is killed and started
    again. Multiplied by MOTET_TIME_SCALE."""

    stop_grace_seconds: float = Field(10.0, ge=0)
    """How long a process may take to end before it is killed."""

    gateway_drain_seconds: float = Field(3.0, ge=0)
    """How long answers under way may go on when everything stops."""
