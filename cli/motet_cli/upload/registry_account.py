"""The user name and the password for a registry: from two variables, or as `docker login` has left them."""

from collections.abc import Mapping
from pathlib import Path

import orjson

from motet.errors import SetupError
from motet_runner.sources.docker_config import NoEntry, NoLogin, login_of

USER, PASSWORD = "MOTET_REGISTRY_USER", "MOTET_REGISTRY_PASSWORD"
VARIABLES = f"{USER} and {PASSWORD}"

MAX_CONFIG_BYTES = 1 << 20


def account_of(image: str, user: str, password: str, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """None: nothing is known, so the registry is asked without. Raises SetupError."""
    if bool(user) != bool(password):
        raise SetupError(f"{VARIABLES} must be set together: {PASSWORD if user else USER} is missing.")
    if user:
        return user, password
    path = Path(environment.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SetupError(f"{path} can't be read: {error.strerror}. Correct that, or set {VARIABLES}.") from error
    return login_in(text, image, path)


def login_in(text: bytes, image: str, path: Path) -> tuple[str, str] | None:
    try:
        config = orjson.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
    except orjson.JSONDecodeError:
        config = None
    if not isinstance(config, dict):
        raise SetupError(
            f"{path} is no JSON object of at most {MAX_CONFIG_BYTES} bytes. Correct it, or set {VARIABLES}."
        )
    registry = image.partition("/")[0]
    if config.get("auths"):
        try:
            return login_of(text, image)
        except NoEntry:
            pass
        except NoLogin as wrong:
            if not _helper(config, registry):  # its entries are empty
                raise SetupError(f"{path} {wrong}, or set {VARIABLES}.") from None
    if helper := _helper(config, registry):
        raise SetupError(f"{path} leaves {registry} to {helper}, and Motet asks no credential helper. Set {VARIABLES}.")
    return None


def _helper(config: Mapping[str, object], registry: str) -> str:
    """The entry that names a helper; empty if there is none."""
    helpers = config.get("credHelpers")
    if isinstance(helpers, dict) and registry in helpers:
        return f"credHelpers.{registry}"
    return "credsStore" if config.get("credsStore") else ""
