"""The gateway's own settings, MOTET_GATEWAY_<FIELD> in the environment."""

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where it listens and how long it is patient."""

    model_config = SettingsConfigDict(env_prefix="MOTET_GATEWAY_", frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    """The address to listen on. On a loopback address requests must name this machine in their Host header, so that a
    web page cannot reach a gateway without keys by rebinding a name of its own."""

    port: int = Field(8000, ge=0, le=65535)
    """The port of the OpenAI-compatible URL. 0 takes any free one."""

    allowed_hosts: tuple[str, ...] = ()
    """Further names that the Host header may say on a loopback address, as a JSON list; `["*"]` allows all of them."""

    auth: Literal["keys", "none"] | None = None
    """Who may come in. `keys`: whoever has an API key (`motet key create`); before the first was made, nobody. `none`:
    everybody, as tenant `default`. Unset: on a loopback address everybody until the first key was made, and from then
    on whoever has one; on any other address keys, and without one the gateway does not start."""

    keys_file: Path | None = None
    """A file with API keys, one a line as `motet key hash` prints them, or a folder of such files, such as a Secret
    that is mounted. Empty: they are in the database (MOTET_DATABASE_URL)."""

    keys_read_seconds: float = Field(2.0, gt=0)
    """How often keys are looked for that were made, revoked or have expired."""

    keys_trusted_seconds: float = Field(600.0, ge=0)
    """How long known keys open while keys cannot be read. Unknown ones get 503 meanwhile, and then all."""

    metrics_dir: Path | None = None
    """A folder with the `<service>.metrics.sock` of this machine's other processes. GET /metrics on the gateway's port
    shows what they all say, with the label `service`; the local stack sets it. Empty: nothing is there, since
    clients of a shared gateway have no use for the platform's figures; its own are at MOTET_METRICS_ADDRESS."""

    predict_budget_seconds: float = Field(0.025, gt=0)
    """How long a request waits for the predictor. Past it the gateway's own statistics stand in. 25 ms suits a laptop
    whose cores are shared with the model; 5 ms a cluster."""

    hold_seconds: float = Field(2.0, ge=0)
    """How long the 200 of a stream is held until the request runs, so that what goes wrong before has a real status."""

    keep_alive_seconds: float = Field(10.0, gt=0)
    """A stream without tokens sends a comment this often that says what it waits for."""

    deadline_seconds: float = Field(300.0, gt=0)
    """How long a request may go without a new token (queued, parked, or while its runner is replaced) before it ends
    with an error."""

    connect_seconds: float = Field(2.0, gt=0)
    """How long a placed request waits for the stream to its runner before the scheduler is asked for another place.
    Multiplied by MOTET_TIME_SCALE."""

    drain_seconds: float = Field(30.0, ge=0)
    """How long running streams may go on after SIGTERM; then they end with an error."""

    max_body_bytes: int = Field(10 * 1024 * 1024, gt=0)
    """Largest request body."""

    body_seconds: float = Field(60.0, gt=0)
    """How long a request body may take to arrive. At 10 MiB that is a slow line; a client that sends a byte now and
    then would otherwise hold its memory for ever."""

    max_bodies_bytes: int = Field(128 * 1024 * 1024, gt=0)
    """Bodies of all requests under way together. A body becomes about ten times its size as objects and tokens; above
    this new ones get 503, before memory runs out."""

    max_header_bytes: int = Field(32 * 1024, ge=1024)
    """Largest request line with headers, trailers and the framing between pieces of a body included. Twice what Node.js
    takes, so that cookies and tokens of a proxy in between fit."""

    max_headers: int = Field(128, ge=16)
    """Most header fields. Clients send about fifteen, proxies add a few."""

    header_seconds: float = Field(20.0, gt=0)
    """How long a request line with its headers may take to arrive, and a connection to its first request."""

    unread_seconds: float = Field(30.0, gt=0)
    """How long a client may leave what it was sent unread, once the buffers in between are full; then its connection is
    cut and its request cancelled, so that it cannot hold memory and a place longer than others. Who reads at least
    16 KiB in this time of a large answer that has come to its end gets all of it."""

    max_live_requests: int = Field(10_000, gt=0)
    """Requests that are open, and choices under way, waiting ones included. Above it new requests get 503, before
    memory runs out."""

    threaded_prompt_bytes: int = Field(4096, ge=0)
    """Prompts with more text than this are tokenised in a thread, so that they do not delay other streams' tokens."""

    max_counted_bytes: int = Field(1024 * 1024, gt=0)
    """Largest body of /tokenize and /detokenize. A megabyte is about a second of work, of which nobody gets an answer
    but the one who asked."""

    template_processes: int = Field(4, gt=0)
    """Most processes that render chat templates, each one started when it is first needed and then kept. Normally one
    is enough; further ones are for templates and conversations that take their time."""

    template_cpu_seconds: float = Field(1.0, gt=0)
    """CPU time that one rendering of a chat template may take; then its process is killed and the request gets a 400.
    Real templates need milliseconds, a hostile one would run without end."""

    template_memory_bytes: int = Field(256 * 1024 * 1024, ge=32 * 1024 * 1024)
    """Memory that one process may take for rendering, beside what it starts with."""

    @field_validator("auth", "keys_file", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: object) -> object:
        return value or None

    @property
    def is_local(self) -> bool:
        """Only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
