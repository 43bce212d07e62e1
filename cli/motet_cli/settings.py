"""Settings of the command line, from the environment."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of all commands. An option on the command line overrides its setting."""

    model_config = SettingsConfigDict(env_prefix="MOTET_", frozen=True, extra="ignore")

    data_dir: Path | None = None
    """The state directory, as with `--data-dir`. Unset: `$XDG_DATA_HOME/motet`, or `~/.local/share/motet` if
    XDG_DATA_HOME is not set."""

    host: str = "127.0.0.1"
    """The address on which the gateway of `motet up` listens. Other machines can reach any address that is not a
    loopback address. Without API keys, each of them may use the gateway."""

    api_key: str = Field("", repr=False)
    """The API key that `motet chat` sends to gateways that ask for one. There is no option for it, because every user
    of the machine can read the arguments of a command."""

    registry_user: str = ""
    """The user name with which `motet adapter push --to oci://…` sends an adapter to a registry. Empty: the one that
    `docker login` has left in `~/.docker/config.json`."""

    registry_password: str = Field("", repr=False)
    """The password that belongs to MOTET_REGISTRY_USER. There is no option for either, because every user of the
    machine can read the arguments of a command."""
