"""What a fetching child is told, and what it says: lines of JSON. No secret is in either."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import orjson


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkAccess:
    """How a child may reach the world."""

    hub_endpoint: str = "https://huggingface.co"
    allowed_hosts: tuple[str, ...] = ()
    ca_file: str = ""
    proxy: str = ""
    proxy_guards: bool = False
    """The proxy is given names and decides where they may lead."""
    manifests: str = ""
    """The folder of manifests whose Secrets are used; empty: the API server's."""

    api_server: str = ""
    service_account: str = ""
    """The folder with the runner's token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOrder:
    what: Literal["adapter", "model"]
    uri: str
    into: str
    """The folder for the files. What an earlier child has left there is gone on with."""

    revision: str = ""
    credentials: str = ""
    """namespace/name of a Secret."""

    max_bytes: int
    stall_seconds: float
    slowest: int
    """Bytes a second, on average over the whole fetch."""

    parallel: int = 1
    parent: int = 0
    access: NetworkAccess = NetworkAccess()

    @property
    def longest_seconds(self) -> float:
        return 4 * self.stall_seconds + self.max_bytes / self.slowest

    def encoded(self) -> bytes:
        return orjson.dumps(asdict(self)) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "FetchOrder":
        said: dict[str, Any] = orjson.loads(line)
        access = said.pop("access")
        return cls(access=NetworkAccess(**access | {"allowed_hosts": tuple(access["allowed_hosts"])}), **said)
