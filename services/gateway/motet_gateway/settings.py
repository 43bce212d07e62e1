"""The gateway's own settings, MOTET_GATEWAY_<FIELD> in the environment."""

from pathlib import Path

from pydantic import Field
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

    metrics_dir: Path | None = None
    """A folder with the `<service>.metrics.sock` of this machine's other processes. GET /metrics on the gateway's port
    shows what they all say, with the label `service`; the local stack sets it. Empty: nothing is there, since figures
    carry tenants' names; the gateway's own are at MOTET_METRICS_ADDRESS."""

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

    max_live_requests: int = Field(10_000, gt=0)
    """Choices under way at once, waiting ones included. Above it new requests get 503, before memory runs out."""

    threaded_prompt_bytes: int = Field(4096, ge=0)
    """Prompts with more text than this are tokenised in a thread, so that they do not delay other streams' tokens."""
