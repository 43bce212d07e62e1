"""The order for a fetch process, as one line of JSON. It contains no secret."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import orjson


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkAccess:
    """How a fetch process may use the network."""

    hub_endpoint: str = "https://huggingface.co"
    s3_endpoint: str = ""
    """Empty: AWS S3"""
    s3_region: str = "us-east-1"
    allowed_hosts: tuple[str, ...] = ()
    ca_file: str = ""
    proxy: str = ""
    proxy_guards: bool = False
    """True if the proxy gets names, and itself decides which addresses are allowed."""
    manifests: str = ""
    """The folder of manifests whose Secrets are used. Empty: the API server's Secrets are used."""

    api_server: str = ""
    service_account: str = ""
    """The folder with the runner's token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOrder:
    what: Literal["adapter", "model"]
    uri: str
    into: str
    """The folder for the files. The fetch continues with what an earlier fetch process has left there."""

    revision: str = ""
    credentials: str = ""
    """namespace/name of a Secret."""

    max_bytes: int
    stall_seconds: float
    min_average_bytes_per_second: int
    """The least bytes per second, on average over the whole fetch."""

    parallel: int = 1
    parent: int = 0
    asks_room: bool = False
    """True if the process asks the service for room on the disk before it writes."""
    access: NetworkAccess = NetworkAccess()

    @property
    def max_seconds(self) -> float:
        return 4 * self.stall_seconds + self.max_bytes / self.min_average_bytes_per_second

    def encoded(self) -> bytes:
        return orjson.dumps(asdict(self)) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> "FetchOrder":
        fields: dict[str, Any] = orjson.loads(line)
        access = fields.pop("access")
        return cls(access=NetworkAccess(**access | {"allowed_hosts": tuple(access["allowed_hosts"])}), **fields)
