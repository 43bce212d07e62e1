"""What a runner can be told. The operator writes these from the pool's `engine` section."""

from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from motet.errors import ModelFolderError, SetupError
from motet_runner.interface import EngineConfig

IN_A_CLUSTER = "/var/lib/motet/volumes"


class Settings(BaseSettings):
    """Settings of one runner: what it serves, where it listens, and how much it may hold."""

    model_config = SettingsConfigDict(env_prefix="MOTET_RUNNER_", frozen=True, extra="ignore", populate_by_name=True)

    pool: str = "default/default"
    """The ServingPool this runner belongs to, as namespace/name."""

    group: str = ""
    """The group whose base model and adapters it serves, as namespace/name. Empty: the pool is its own group."""

    revision: str = ""
    """Of the pool's template: a rollout replaces runners of other revisions."""

    instance: str = "runner-0"
    """This runner's stable name within the pool."""

    pod_name: str = ""
    """In a cluster: the pod this is."""

    pod_uid: str = ""
    """In a cluster: the pod's uid."""

    model_uri: str = ""
    """Where the base model lies: file:///folder with config.json and safetensors, hf://org/name or https://host/folder/."""

    model_revision: str = ""
    """Branch, tag or commit of an hf:// model. Empty: main."""

    model_credentials: str = ""
    """namespace/name of the Secret that opens the model's source. Empty: it is open."""

    model_digest: str = ""
    """What the base model's bytes must add up to (`spec.model.digest` of the pool). Empty: whatever is there."""

    listen: str = "localhost:7110"
    """Where this runner listens: `unix:/path` or `host:port`."""

    address: str = ""
    """Where gateways reach it, when that is not what it listens on (a pod's address)."""

    preset: str = "paged-chunk"
    """How the engine composes and reserves; one of the engine's presets."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV. `auto`: float32 on a CPU, the model's own on a GPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU when there is one."""

    max_lora_rank: int = Field(64, ge=1, le=512)
    """Adapters of a higher rank are refused."""

    max_resident_adapters: int = Field(16, ge=1)
    """Adapters on the device at a time. Memory for so many of rank 16 is set aside: fewer of larger ranks fit at once,
    and one of any rank up to `max_lora_rank` always does."""

    max_cached_adapters: int = Field(64, ge=1)
    """Adapters in the disk cache. Beyond it the longest unused goes; one in use never does."""

    max_adapter_mib: int = Field(2048, ge=1)
    """An adapter whose weights are larger is refused before they are read."""

    max_model_gib: int = Field(1024, ge=1)
    """A base model that is larger is not fetched."""

    model_cache: Path | None = None
    """Where fetched models stay. Runners of several machines may share it; what is there whole is not fetched again.
    Absent: in the state directory."""

    volumes: str = ""
    """The folder whose subfolders are the volumes of the pool's `adapterVolumes`: file:// adapters lie below one of
    them, and no link may lead out of it. Empty: in a cluster /var/lib/motet/volumes, elsewhere any folder."""

    hub_endpoint: str = "https://huggingface.co"
    """Where hf:// is: the public hub, or a mirror that speaks like it."""

    fetch_allowed_hosts: list[str] = []
    """Hosts and networks that sources may lead to although they are not public: mirrors inside. JSON, such as
    ["models.corp.example", "10.20.0.0/16"]. All other private, loopback and link-local addresses are refused."""

    fetch_ca_file: str = ""
    """A PEM file with authorities to trust beside the system's, for https:// sources and the hub."""

    fetch_proxy: str = Field("", pattern=r"^(https?://[^/\s]+/?)?$")
    """A proxy for all fetching, as http://host:port, which takes CONNECT. The runner resolves each name, looks at where
    it leads as without a proxy, and asks the proxy for the address."""

    fetch_proxy_guards: bool = False
    """The proxy is given names instead, and it alone decides where they may lead: for runners that cannot resolve names
    of the internet, and only for a proxy that refuses private, loopback, link-local and metadata addresses itself."""

    fetch_stall_seconds: float = Field(30.0, gt=0)
    """A fetch that brings less than 1 KiB/s over so long is broken off, and gone on with later; before the time
    scale."""

    fetch_kib_per_second: int = Field(1024, ge=1)
    """What a source must give on average: a fetch that takes longer than its largest allowed size would at this rate is
    broken off, makes way for others, and is gone on with later."""

    fetches_at_once: int = Field(4, ge=1, le=64)
    """Adapters fetched from hubs and the web at a time, of one namespace always one fewer; and shards of a base
    model."""

    manifests: str = ""
    """The folder of manifests whose Secrets open sources; the local stack sets it. Empty: the API server's Secrets."""

    service_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """The folder with `token` and `ca.crt` for reading the Secrets that tenants have granted."""

    kubernetes_host: str = Field("", validation_alias="KUBERNETES_SERVICE_HOST")
    """KUBERNETES_SERVICE_HOST: Kubernetes sets it in every pod."""

    kubernetes_port: str = Field("443", validation_alias="KUBERNETES_SERVICE_PORT")
    """KUBERNETES_SERVICE_PORT: the same."""

    max_model_length: int | None = Field(None, ge=16)
    """Longest prompt and answer together, in tokens. Unset: what the model allows."""

    max_concurrent_sequences: int = Field(64, ge=1)
    """Sequences in one iteration."""

    memory_utilization_percent: int = Field(90, ge=1, le=100)
    """Share of the device's memory for weights, KV and adapters together."""

    kv_cache_mib: int | None = Field(None, ge=1)
    """KV cache in MiB; overrides the percentage. On a CPU the default is 512. The adapters' memory comes beside it."""

    host_kv_mib: int | None = Field(None, ge=0)
    """Host memory for parked KV, in MiB. On a CPU the default is a sixteenth of the KV cache: it is the same memory."""

    prefill_chunk_tokens: int = Field(512, ge=16)
    """Prompt tokens in one iteration: a long prompt is taken in pieces so that others keep going."""

    threads: int | None = Field(None, ge=1)
    """Threads of the engine on a CPU. Unset: one, whatever the machine has."""

    step_trace: str = Field("", validation_alias="MOTET_STEP_TRACE")
    """MOTET_STEP_TRACE: a file for one JSON line per iteration; `{instance}` in it becomes this runner's name."""

    report_seconds: float = Field(1.0, gt=0)
    """Time between reports to scheduler and supervisor, before the time scale."""

    gateway_grace_seconds: float = Field(1.0, ge=0)
    """How long sequences outlive their gateway's broken stream, before the time scale."""

    adapter_wait_seconds: float = Field(5.0, gt=0)
    """How long a submitted request waits for an adapter that is still being fetched, before the time scale."""

    protect_after_steps: int = Field(64, ge=0)
    """Iterations a sequence at its promise waits for the supervisor's answer, while others run, until the engine
    protects itself."""

    supervisor_answer_seconds: float = Field(1.0, gt=0)
    """How long an announced overflow may stay unanswered until the runner protects itself, before the time scale."""

    drain_seconds: float = Field(0.0, ge=0)
    """How long running answers may go on after SIGTERM. Nothing new is taken on meanwhile, what waits goes back at
    once, and what still runs at the end moves to another runner. 0: everything moves at once."""

    hang_seconds: float = Field(60.0, gt=0)
    """An engine that has work and completes no step for this long counts as hung: /livez says so."""

    outbox_kib: int = Field(16 * 1024, ge=1)
    """KiB that may wait for a gateway that does not read. Beyond it its stream is broken: it is as good as dead."""

    @property
    def served_group(self) -> str:
        return self.group or self.pool

    @property
    def reachable_at(self) -> str:
        return self.address or self.listen

    @property
    def api_server(self) -> str:
        host = f"[{self.kubernetes_host}]" if ":" in self.kubernetes_host else self.kubernetes_host
        return f"https://{host}:{self.kubernetes_port}" if host else ""

    @property
    def adapter_volumes(self) -> Path | None:
        return Path(self.volumes or IN_A_CLUSTER) if self.volumes or self.kubernetes_host else None

    def model_folder(self) -> Path:
        """The base model's folder on this machine. Raises SetupError that names what is missing."""
        parts = urlsplit(self.model_uri)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise SetupError(
                f"model {self.model_uri!r} cannot be read: a runner reads base models from a folder given as "
                "file:///absolute/path, from hf://org/name or from https://host/folder/."
            )
        folder = Path(unquote(parts.path))
        if not folder.is_dir():
            raise ModelFolderError(f"there is no model folder {folder}: correct model.uri of the pool {self.pool}.")
        return self.check_model(folder)

    @staticmethod
    def check_model(folder: Path) -> Path:
        if not (folder / "config.json").is_file():
            raise ModelFolderError(
                f"{folder} has no config.json, so it is not a model folder: it must hold what save_pretrained() writes."
            )
        if not any(folder.glob("*.safetensors")):
            raise ModelFolderError(
                f"{folder} holds no *.safetensors: other weight formats are not read. Save the model again with "
                "save_pretrained()."
            )
        return folder

    def engine_config(self, model: Path) -> EngineConfig:
        trace = self.step_trace.replace("{instance}", self.instance)
        return EngineConfig(
            model=model,
            preset=self.preset,
            dtype=self.dtype,
            device=self.device,
            max_lora_rank=self.max_lora_rank,
            max_resident_adapters=self.max_resident_adapters,
            max_model_length=self.max_model_length,
            max_concurrent_sequences=self.max_concurrent_sequences,
            memory_utilization_percent=self.memory_utilization_percent,
            kv_cache_mib=self.kv_cache_mib,
            host_kv_mib=self.host_kv_mib,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            threads=self.threads,
            protect_after_steps=self.protect_after_steps,
            step_trace=Path(trace) if trace else None,
        )
