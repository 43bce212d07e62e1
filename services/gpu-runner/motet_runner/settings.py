"""What a runner can be told. The operator writes these from the pool's `engine` section."""

from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from motet.errors import ModelFolderError, SetupError
from motet_runner.interface import EngineConfig


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
    """Where the base model lies: an absolute file:// URI of a folder with config.json and safetensors."""

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
    """Adapters on the device at a time."""

    max_cached_adapters: int = Field(64, ge=1)
    """Adapters in the disk cache. Beyond it the longest unused goes; one in use never does."""

    max_adapter_mib: int = Field(2048, ge=1)
    """An adapter whose weights are larger is refused before they are read."""

    max_model_length: int | None = Field(None, ge=16)
    """Longest prompt and answer together, in tokens. Unset: what the model allows."""

    max_concurrent_sequences: int = Field(64, ge=1)
    """Sequences in one iteration."""

    memory_utilization_percent: int = Field(90, ge=1, le=100)
    """Share of the device's memory for weights, KV and adapters together."""

    kv_cache_mib: int | None = Field(None, ge=1)
    """KV cache in MiB; overrides the percentage. On a CPU the default is 512."""

    host_kv_mib: int | None = Field(None, ge=0)
    """Host memory for parked KV, in MiB. On a CPU the default is a sixteenth of the KV cache: it is the same memory."""

    prefill_chunk_tokens: int = Field(512, ge=16)
    """Prompt tokens in one iteration: a long prompt is taken in pieces so that others keep going."""

    threads: int | None = Field(None, ge=1)
    """Threads of the engine on a CPU. Unset: torch decides."""

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

    outbox_kib: int = Field(16 * 1024, ge=1)
    """KiB that may wait for a gateway that does not read. Beyond it its stream is broken: it is as good as dead."""

    @property
    def served_group(self) -> str:
        return self.group or self.pool

    @property
    def reachable_at(self) -> str:
        return self.address or self.listen

    def model_folder(self) -> Path:
        """The base model's folder. Raises SetupError that names what is missing."""
        if not self.model_uri:
            raise SetupError(
                "MOTET_RUNNER_MODEL_URI is not set: give the base model's folder as file:///path/to/model."
            )
        parts = urlsplit(self.model_uri)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise SetupError(
                f"model {self.model_uri!r} cannot be read: a runner reads base models from a folder given as "
                "file:///absolute/path."
            )
        folder = Path(unquote(parts.path))
        if not folder.is_dir():
            raise ModelFolderError(f"there is no model folder {folder}: correct model.uri of the pool {self.pool}.")
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

    def engine_config(self) -> EngineConfig:
        trace = self.step_trace.replace("{instance}", self.instance)
        return EngineConfig(
            model=self.model_folder(),
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
