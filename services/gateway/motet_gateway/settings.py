"""The gateway's own settings, MOTET_GATEWAY_<FIELD> in the environment."""

import ipaddress
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where it listens and how long it is patient."""

    model_config = SettingsConfigDict(env_prefix="MOTET_GATEWAY_", frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    """The address to listen on. On a loopback address the Host header of each request must name this machine. Otherwise
    a web page could reach a gateway without keys through a DNS name of its own (DNS rebinding)."""

    port: int = Field(8000, ge=0, le=65535)
    """The port of the OpenAI-compatible URL. 0: any free port."""

    allowed_hosts: tuple[str, ...] = ()
    """Names that the Host header may have on a loopback address besides those of this machine, as a JSON list; `["*"]`
    allows all names."""

    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may ask this gateway from a browser, as a JSON list such as
    `["https://app.example"]`; `["*"]`: all pages. Then whoever writes such a page can use a gateway without keys."""

    adapter_folders: tuple[Path, ...] = ()
    """Folders of this machine, as a JSON list such as `["/srv/adapters"]`. On the local stack, adapters below them
    may be loaded with POST /v1/load_lora_adapter, and unloaded again, by whoever has a key with the scope `admin`; by
    everybody while no key is needed. Links that lead out of them are refused. Empty: both calls are refused."""

    auth: Literal["keys", "none"] | None = None
    """Who may send requests. `keys`: only those with an API key (`motet key create`); nobody until the first key is
    made. `none`: everybody, as tenant `default`. Unset: on a loopback address everybody until the first key is made,
    and then only those with a key; on any other address only those with a key, and the gateway does not start while
    there is none."""

    keys_file: Path | None = None
    """A file with API keys, one on each line as `motet key hash` prints them, or a folder of such files, such as a
    mounted Secret. Empty: keys are read from the database (MOTET_DATABASE_URL)."""

    keys_read_seconds: float = Field(2.0, gt=0)
    """How often keys are read again. New, revoked and expired keys are noticed within this time."""

    keys_trusted_seconds: float = Field(600.0, ge=0)
    """How long known keys are still accepted while keys cannot be read. Unknown keys get 503 meanwhile. After this time
    all keys do."""

    metrics_dir: Path | None = None
    """A folder with the `<service>.metrics.sock` of the other processes on this machine. GET /metrics on the gateway's
    port then shows the metrics of all of them, with the label `service`; the local stack sets it. Empty: that page does
    not exist, since clients of a shared gateway need no metrics of the platform. The gateway's own metrics are at
    MOTET_METRICS_ADDRESS."""

    features_key_file: Path | None = None
    """A file with the key by which prompts are made into features for the predictor. Gateways of one predictor share
    it, and the database must not have it. Empty: `features.key` in the state directory, made at the first start."""

    predict_budget_seconds: float = Field(0.025, gt=0)
    """How long a request waits for the predictor. After that the gateway uses its own statistics. 25 ms suits a laptop
    whose cores also compute the model; 5 ms suits a cluster."""

    hold_seconds: float = Field(2.0, ge=0)
    """How long the headers of a stream may wait until its request runs. An error in that time gets its own HTTP status;
    a later one is an event in a stream with status 200."""

    keep_alive_seconds: float = Field(10.0, gt=0)
    """How often a stream without new tokens sends a comment, which says what the request waits for."""

    deadline_seconds: float = Field(300.0, gt=0)
    """How long a request may get no new token (in the queue, parked, or while its runner is replaced) before it ends
    with an error."""

    connect_seconds: float = Field(2.0, gt=0)
    """How long the stream to a runner may be down before the scheduler is asked for another runner for a request that
    was placed there. Multiplied by MOTET_TIME_SCALE. Then requests wait half a second for the next attempt to open the
    stream."""

    drain_seconds: float = Field(30.0, ge=0)
    """How long running streams may continue after SIGTERM. After that they end with an error."""

    max_body_bytes: int = Field(10 * 1024 * 1024, gt=0)
    """The largest request body, in bytes."""

    body_seconds: float = Field(60.0, gt=0)
    """How long a request body may take to arrive. Without a limit, a client that sends a byte now and then would hold
    memory for ever."""

    max_bodies_bytes: int = Field(192 * 1024 * 1024, gt=0)
    """The most memory that the bodies of all requests under way may take together, with the log probabilities that wait
    to be sent. Above it requests get 503. As objects and tokens a body takes twice its size, text with characters
    beyond ASCII five times, and each list, string and number some bytes more. Besides this, tokenising takes at most
    280 MB, and a gateway at rest about 150 MB with its first model."""

    max_header_bytes: int = Field(32 * 1024, ge=1024)
    """The most bytes of a request line with its headers. Trailers and the framing of a body's pieces count as well. The
    default is twice that of Node.js, so that cookies and tokens that a proxy adds fit."""

    max_headers: int = Field(128, ge=16)
    """The most header fields of a request. Clients send about fifteen, proxies add a few."""

    header_seconds: float = Field(20.0, gt=0)
    """How long a request line with its headers may take to arrive. A new connection may take as long until its first
    request."""

    unread_seconds: float = Field(30.0, gt=0)
    """How long a client may leave unread what it was sent, once the buffers in between are full. Then its connection is
    closed and its request cancelled, so that it does not hold memory any longer. When a large answer has ended, a
    client that reads at least 16 KiB in this time gets all of it."""

    max_connections: int = Field(12_000, gt=0)
    """The most connections of clients, idle ones included. A client above it gets 503 at once, and its connection is
    closed before anything is read of it. Choose more than `max_live_requests`: each request has a connection, and
    clients keep idle ones for later. Also, the operating system has to allow as many open files (`ulimit -n`)."""

    max_connections_per_address: int = Field(0, ge=0)
    """The most connections from one IP address. 0: no limit. Leave it at 0 behind a proxy or a load balancer that has
    one address for all clients."""

    histories: int = Field(1_000, ge=1)
    """Of how many ended requests the gateway still says what happened to them (`motet why`), besides those that run."""

    max_live_requests: int = Field(10_000, gt=0)
    """The most requests that may be open, and the most choices that may be under way, waiting ones included. Above it
    new requests get 503, before memory runs out."""

    threaded_prompt_bytes: int = Field(4096, ge=0)
    """Prompts with more bytes of text than this are tokenised in a thread, so that they do not delay other streams'
    tokens. At most four texts up to 64 KiB, one up to 1 MiB and one longer text are tokenised at the same time."""

    max_counted_bytes: int = Field(1024 * 1024, gt=0)
    """The largest body of /tokenize and /detokenize, in bytes. A megabyte takes about a second of work."""

    template_processes: int = Field(2, gt=0)
    """The most processes that render chat templates at once. One is normally enough; more help when templates or
    conversations take long, and each may take `template_memory_bytes`. Templates that requests or adapters bring take
    one process fewer, if there are several. A process that has nothing to do is kept: see `template_idle_bytes`."""

    template_cpu_seconds: float = Field(1.0, gt=0)
    """CPU time that rendering one chat template may take. Then its process is killed and the request gets 400. Normal
    templates need milliseconds, a hostile one would run without end."""

    template_memory_bytes: int = Field(160 * 1024 * 1024, ge=32 * 1024 * 1024)
    """Bytes of memory that a process may take for rendering, besides what it has at its start. The default is enough
    for any conversation of `max_body_bytes`."""

    template_idle_bytes: int = Field(100 * 1024 * 1024, ge=16 * 1024 * 1024)
    """Bytes of memory that processes may take that have rendered chat templates and wait for the next conversation.
    Each namespace whose adapters have templates of their own needs one, which takes 4 to 5 MB, more with long
    templates. The default is enough for about twenty. Without one a conversation waits until a process has started and
    read the template. Raise it together with the memory of the gateway's container where there are more."""

    @field_validator("auth", "keys_file", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return value or None

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for one in origins:
            if one != "*" and not re.fullmatch(r"https?://[^/\s*]+", one):
                raise ValueError(f"{one!r} is no origin: write it as https://app.example, without a path, or as *")
        return origins

    @field_validator("adapter_folders")
    @classmethod
    def _are_absolute(cls, folders: tuple[Path, ...]) -> tuple[Path, ...]:
        for one in folders:
            if not one.is_absolute() or ".." in one.parts:
                raise ValueError(f"{one} must be an absolute path without '..', such as /srv/adapters")
        return folders

    @property
    def is_local(self) -> bool:
        """Only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
