"""What the command line reads from the environment besides its options."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """For every command; an option on the command line comes first where there is one."""

    model_config = SettingsConfigDict(env_prefix="MOTET_", frozen=True, extra="ignore")

    data_dir: Path | None = None
    """The state directory, as `--data-dir`. Unset: `$XDG_DATA_HOME/motet`, which is `~/.local/share/motet` unless said
    otherwise."""

    host: str = "127.0.0.1"
    """The address at which `motet up` lets the gateway listen. Anything but a loopback address can be reached from
    other machines, and without keys by all of them."""

    api_key: str = Field("", repr=False)
    """What `motet chat` sends to gateways that ask for an API key. Not an option: arguments can be read by everybody on
    the machine."""
