"""The settings of a runner. The operator sets them from the pool's manifest."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from motet.addresses import Address, host_and_port
from motet.domain import MAX_LORA_RANK
from motet.errors import ModelFolderError, SetupError
from motet.promises import USUAL_PROMISE_QUANTILE, PromiseQuantile
from motet.runner_info import MAX_TPOT_MILLISECONDS, AttentionBackend, KvCacheDtype
from motet.sources import EXAMPLES, folder_of
from motet_runner.interface import EngineConfig
from motet_runner.sources.s3 import is_endpoint

CLUSTER_VOLUMES = "/var/lib/motet/volumes"

KERNEL_CACHE = Path("~/.cache/motet/kernels")
"""The default folder of compiled kernels"""


def _endpoint(text: str) -> str:
    if text and not is_endpoint(text.removesuffix("/")):
        raise ValueError("must be the address of a store as http(s)://host:port, without a path")
    return text


class Settings(BaseSettings):
    """Settings of one runner: what it serves, where it listens, and how much it may hold."""

    model_config = SettingsConfigDict(env_prefix="MOTET_RUNNER_", frozen=True, extra="ignore", populate_by_name=True)

    pool: str = "default/default"
    """The ServingPool that this runner belongs to, as namespace/name."""

    group: str = ""
    """The group of pools whose base model and adapters this runner serves, as namespace/name. Empty: the pool is its
    own group."""

    revision: str = ""
    """The revision of the pool's template from which this runner was made. A rollout replaces runners of other
    revisions."""

    instance: str = "runner-0"
    """This runner's stable name within the pool."""

    pod_name: str = ""
    """In a cluster: the name of this pod."""

    pod_uid: str = ""
    """In a cluster: the uid of this pod."""

    model_uri: str = ""
    """The [source](manifests.md#sources) of the base model, such as file:///folder with config.json and safetensors."""

    model_revision: str = ""
    """Branch, tag or commit, for sources that have them. Empty: main."""

    model_credentials: str = ""
    """namespace/name of the Secret that opens the model's source. Empty: the source needs none."""

    model_digest: str = ""
    """The digest that the base model's files must have (`spec.model.digest` of the pool). Empty: any."""

    listen: Address = "localhost:7110"
    """Where this runner listens: `unix:/path` or `host:port`."""

    address: Address = ""
    """The address at which gateways reach this runner, such as a pod's. Empty: the address of `listen`."""

    backend: Literal["motet", "vllm"] = "motet"
    """The engine: Motet's own, or vLLM in the environment of `engine_python`. The page on vLLM says what differs."""

    engine_python: Path | None = None
    """The Python of an environment with vLLM, for the backend `vllm`. The environment of the runner itself stays as it
    is."""

    tensor_parallel: int = Field(1, ge=1)
    """How many GPUs share each layer. For the backend `vllm`, like the next four."""

    stages: int = Field(1, ge=1)
    """How many groups of GPUs share the layers, one after the other."""

    kv_cache_dtype: KvCacheDtype = "auto"
    """Data type of KV. `auto`: the model's. With `fp8` a page takes half of the memory of bfloat16, and answers may
    change."""

    enforce_eager: bool = False
    """Whether vLLM compiles nothing and records no graphs: it starts sooner, and is slower."""

    attention_backend: AttentionBackend | None = None
    """What computes attention on a GPU. Unset: vLLM's choice."""

    preset: str = "paged-chunk"
    """How the engine forms batches and reserves memory: one of the engine's presets."""

    contiguous: bool = False
    """Whether a sequence that begins takes pages for its whole promise, as one run of memory, and runs are moved
    together when no gap is large enough. Otherwise a sequence takes each page when it needs it. Only for presets that
    admit by promises, and without a prefix cache: for comparisons."""

    promise_quantile: Annotated[PromiseQuantile, BeforeValidator(int)] = USUAL_PROMISE_QUANTILE
    """A request is promised pages for this quantile of its estimated length, in percent: 50, 80, 90 or 95. Larger
    values keep more memory unused, and fewer answers outgrow their promise. Only presets that promise by an estimate
    use this setting."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV. `auto`: on a GPU, the model's own type. On a CPU, bfloat16 for files in bfloat16, if
    the CPU multiplies bfloat16 and a short measurement does not find float32 faster (there is none before kernels are
    compiled); else float32. The log says which type and why."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is computed. `auto`: on a GPU if there is one, else on the CPU."""

    kernels: str = "auto"
    """The code that computes adapters and attention. `torch` runs everywhere. `cpp`, for a CPU, is compiled once on
    this machine, and the runner does not start without it. `triton`, for a GPU, needs Triton and a C compiler, and the
    runner does not start if these kernels compute other results than torch. With `auto` on a CPU, torch serves until
    `cpp` is compiled and tested and the runner has no requests; without a compiler, torch always serves. With `auto` on
    a GPU, `triton` serves, or torch if `triton` cannot. `motet status` and the log say which kernels serve. `exact` is
    exact mode: every request gets the bits that it gets alone, on one thread of a CPU, in float32, and slower."""

    adapter_dtype: Literal["auto", "int8"] = "auto"
    """Data type of adapters in device memory. `auto`: the model's. `int8`, with the kernels `triton`: an adapter takes
    half of the memory of bfloat16, and an iteration reads half of the bytes. The adapter's weights are rounded to 8
    bits, with a scale for each row of the rank."""

    prove_adapters: bool | None = None
    """Whether the engine proves an adapter before it first serves it: on four fixed rows, each linear that it reads
    from its memory must give what follows from the adapter's files, and the logits of a short text must move. Otherwise
    the runner refuses the adapter (`ProofFailed`, `NoEffect`, `NotNumbers`). After a change of version, data type,
    device or kernels, adapters serve on and are proved again beside the requests; so does what a runner of the pool
    with the same build, kernels and model of device has proved. `False`: an adapter is ready once it is checked, and
    its recorded answers are compared if it has any. Unset: on a CPU, yes; on a GPU, no, because how much rounding
    explains there was tried with small models only. Engines with vLLM prove by log probabilities."""

    kernel_cache: Path = KERNEL_CACHE
    """The folder of compiled kernels. Runners of one user may share it. Nobody else may write to it. Kernels with which
    no runner has started for 30 days are removed."""

    compiler: str = ""
    """The C++ compiler of the kernels, as a name or a path. Empty: the first one of c++, g++ and clang++ on the
    path."""

    max_lora_rank: int = Field(64, ge=1, le=MAX_LORA_RANK)
    """Adapters of a higher rank are refused."""

    max_resident_adapters: int = Field(16, ge=1)
    """The most adapters in device memory at a time. An adapter takes pages for its rank, and its pages can become KV
    when no request uses the adapter. Torch's kernels take memory for copies of this number of adapters of rank 16."""

    max_cached_adapters: int = Field(64, ge=1)
    """The most adapters in the disk cache. Beyond this number, an adapter is removed: first what no adapter names, then
    earlier revisions, then what serves; of equals one that few requests use, and of these the one that was used longest
    ago. Adapters that their owners want resident (`minReplicas`) go last. An adapter in use is never removed."""

    adapter_disk_mib: int | None = Field(None, ge=1)
    """The most MiB of the files of adapters in the disk cache, with those of unfinished fetches, and with slabs: these
    take only room that nothing else needs, and leave first. What a check has found takes some KiB more for each
    adapter, and up to 7 MiB if it has a chat template of its own. A fetch begins when adapters that may go have left
    room for it. A larger adapter is refused before it is fetched. Runners that share a cache grant room each to its own
    fetches, and can together exceed the number by these. One slab can exceed it for a moment, if a fetch has got its
    room while it was written. Unset: any number."""

    disk_limit: str = ""
    """What Kubernetes lets this pod's data take on its node's disk, as in the chart's `runner.diskLimit`. If it is set,
    slabs are written only with `adapter_disk_mib`: free space of the disk does not show that limit, and a pod that
    exceeds it is evicted. Empty: no limit but the disk."""

    max_adapter_mib: int = Field(2048, ge=1)
    """The most MiB of an adapter's weights. A larger adapter is refused before its weights are read."""

    max_model_gib: int = Field(1024, ge=1)
    """The most GiB of a base model. A larger model is not fetched."""

    model_cache: Path | None = None
    """The folder where fetched models stay. Runners of several machines may share it. A complete model in this folder
    is not fetched again. Unset: a folder in the state directory."""

    volumes: str = ""
    """The folder whose subfolders are the volumes of the pool's `adapterVolumes`. file:// adapters must be in one of
    these volumes, also after all links are followed. Empty: in a cluster /var/lib/motet/volumes, elsewhere any
    folder."""

    hub_endpoint: str = "https://huggingface.co"
    """The hub that hf:// stands for: the public one, or a mirror with the same API."""

    s3_endpoint: Annotated[str, AfterValidator(_endpoint)] = ""
    """The object store that s3:// stands for, as https://host:port; it may have a private address. Empty: AWS S3.
    A Secret with AWS_ENDPOINT_URL names another one, which must have https:// and an address that is allowed."""

    s3_region: str = Field("us-east-1", pattern=r"^[a-z0-9-]{1,64}$")
    """The region of the object store, unless a Secret has AWS_REGION or the store names the bucket's."""

    fetch_allowed_hosts: list[str] = []
    """Hosts and networks from which adapters and models may be fetched although they are not public, such as mirrors in
    your network. JSON, such as ["models.corp.example", "10.20.0.0/16"]. All other private, loopback and link-local
    addresses are refused."""

    fetch_ca_file: str = ""
    """A PEM file with certificate authorities to trust besides the system's, for https:// sources, the hub,
    object stores and registries."""

    fetch_proxy: str = Field("", pattern=r"^(https?://[^/\s]+/?)?$")
    """A proxy that supports CONNECT, for all fetches, as http://host:port. The runner resolves each name, checks the
    address as without a proxy, and asks the proxy for this address."""

    fetch_proxy_guards: bool = False
    """The runner gives names to the proxy instead of addresses, and the proxy alone decides which addresses are
    allowed. For runners that cannot resolve names of the internet. Use this only with a proxy that itself refuses
    private, loopback, link-local and metadata addresses."""

    fetch_stall_seconds: float = Field(30.0, gt=0)
    """A fetch that brings less than 1 KiB/s for this long is stopped, and continued later. If a volume gives nothing
    for this long, fetches of its adapters fail and are tried again. Multiplied by MOTET_TIME_SCALE."""

    disk_stall_seconds: float = Field(60.0, gt=0)
    """How long the disk of MOTET_DATA_DIR may take to find, check or remove an adapter, and a second more for each 16
    MiB of the adapter. Then the order fails and is tried again, like all further orders until the disk answers.
    MOTET_TIME_SCALE does not change this: a busy disk may need seconds."""

    fetch_kib_per_second: int = Field(1024, ge=1)
    """The average rate in KiB/s that a source must reach. A fetch may take as long as its largest allowed size takes at
    this rate. Then the fetch is stopped, so that other fetches can run, and continued later."""

    fetches_at_once: int = Field(4, ge=1, le=64)
    """How many adapters are fetched from hubs and the web at a time; for one namespace, at most this number less one.
    Also how many files of a base model are fetched at a time."""

    max_partial_fetches: int = Field(16, ge=0)
    """How many interrupted fetches of adapters of one namespace are kept on the disk, to be continued within a day.
    Beyond this number, the oldest is removed."""

    max_partial_mib: int = Field(4096, ge=0)
    """The most MiB that interrupted fetches of adapters of one namespace keep on the disk. Beyond this, the oldest
    fetch is removed. Fetches that run are not counted: `fetches_at_once` bounds their number. When the disk is full,
    all interrupted fetches are removed."""

    manifests: str = ""
    """The folder of manifests with the Secrets that open sources; the local stack sets it. Empty: Secrets are read from
    the API server."""

    service_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """The folder with `token` and `ca.crt` with which the runner reads the Secrets that tenants have granted."""

    kubernetes_host: str = Field("", validation_alias="KUBERNETES_SERVICE_HOST")
    """KUBERNETES_SERVICE_HOST: Kubernetes sets it in every pod."""

    kubernetes_port: str = Field("443", validation_alias="KUBERNETES_SERVICE_PORT")
    """KUBERNETES_SERVICE_PORT: Kubernetes sets it in every pod."""

    max_model_length: int | None = Field(None, ge=16)
    """The most tokens of a prompt and its answer together. Unset: what the model allows."""

    max_concurrent_sequences: int = Field(64, ge=1)
    """The most sequences in one iteration. Larger values give more tokens per second in total and fewer to each
    sequence."""

    memory_utilization_percent: int = Field(90, ge=1, le=100)
    """Percentage of the device's memory for weights, KV and adapters together."""

    kv_cache_mib: int | None = Field(None, ge=1)
    """Memory for pages in MiB, which KV and adapters share; overrides the percentage. On a CPU, the default is 512 MiB
    plus the memory of `max_resident_adapters` adapters of rank 16."""

    host_kv_mib: int | None = Field(None, ge=0)
    """Host memory in MiB for the KV of parked requests. On a CPU, the default is at most a sixteenth of the KV cache,
    because both are in the same memory."""

    host_adapters_mib: int = Field(0, ge=0)
    """Host memory in MiB that keeps adapters for their next load, also those that are on the device now. Such a load
    copies and reads nothing. Adapters that few requests use leave first. On a GPU the memory is pinned at the start. If
    there is not enough, all loads read the disk. On a CPU it saves a part of a millisecond for a small adapter: the
    page cache holds the same bytes. 0: none."""

    prefill_chunk_tokens: int = Field(512, ge=16)
    """The most prompt tokens in one iteration. A longer prompt is computed in pieces, so that other sequences go on.
    Larger values bring the first token earlier and delay the tokens of others."""

    decode_slowdown: float = Field(2.0, gt=1)
    """The longest time of an iteration, as a multiple of the time that its decodes alone would take: while other
    sequences decode, prompts are computed in smaller pieces. Larger values bring the first token earlier and delay the
    tokens of others. Only presets that cut prompts use this setting. Requests that lost their runner in the middle of
    their answer are not held back."""

    tpot_milliseconds: int | None = Field(None, ge=1, le=MAX_TPOT_MILLISECONDS)
    """The longest time per token, as the mean of an answer. The runner learns how long iterations take, and runs as
    many requests at once as keep this time, at least one. Unset: as many as memory and `max_concurrent_sequences`
    allow."""

    threads: int | None = Field(None, ge=1)
    """Threads of the engine on a CPU. Unset: the number that a short measurement finds best, up to the cores that the
    runner may use. The choice is kept beside the compiled kernels for a week. The compiled kernels' results are the
    same with any number of threads. A higher number is lowered to the number of cores. The kernels `exact` have one
    thread."""

    step_trace: str = Field("", validation_alias="MOTET_STEP_TRACE")
    """MOTET_STEP_TRACE: a file for one JSON line per iteration; `{instance}` in it becomes this runner's name."""

    report_seconds: float = Field(1.0, gt=0)
    """Time between two reports to scheduler and supervisor. Multiplied by MOTET_TIME_SCALE."""

    gateway_grace_seconds: float = Field(1.0, ge=0)
    """How long sequences go on after the stream to their gateway broke, before they are cancelled. Multiplied by
    MOTET_TIME_SCALE."""

    adapter_wait_seconds: float = Field(5.0, gt=0)
    """How long a submitted request waits for an adapter that is still being fetched, before it is declined. Multiplied
    by MOTET_TIME_SCALE."""

    protect_after_steps: int = Field(64, ge=0)
    """How many iterations a sequence at the end of its promise waits for the supervisor's answer, while others run.
    Then the engine decides alone."""
    prefix_cache: bool = True
    """Whether a request uses the KV that earlier requests of its tenant have computed for the same first tokens under
    the same adapter. KV that no request uses is dropped when its memory is needed."""

    plan_ahead: int | None = Field(None, ge=0, le=1)
    """How many iterations the engine plans and launches before it collects the oldest iteration. Unset: 1 on a GPU,
    which computes one iteration while the next one is planned, and 0 on a CPU, where 1 gains no time: an iteration is
    computed before its launch returns."""

    supervisor_answer_seconds: float = Field(1.0, gt=0)
    """How long the runner waits for the supervisor's answer to an overflow. Then the runner decides alone. Multiplied
    by MOTET_TIME_SCALE."""

    drain_seconds: float = Field(0.0, ge=0)
    """How long running answers may go on after SIGTERM. Meanwhile the runner accepts no new requests, and hands back
    those that wait. What still runs at the end moves to another runner. 0: everything moves at once. In a pool, the
    operator sets this from `drainTimeoutSeconds`."""

    hang_seconds: float = Field(60.0, gt=0)
    """When the engine has work, and for this long it completes no step and reads no part of an adapter, /livez says
    that it hangs, and Kubernetes restarts the pod. A part has at most 1 MiB: a disk that gives less in this time
    counts as a hang."""

    outbox_kib: int = Field(16 * 1024, ge=1)
    """The most KiB that may wait for a gateway that does not read. Beyond this, the gateway's stream is closed."""

    stream_interval_seconds: float = Field(0.0, ge=0, le=1)
    """How long tokens may wait for the next ones, so that a gateway gets them in one message, and a client in one
    event. 0: each step of the engine is a message of its own. For models with steps of a few milliseconds on few cores:
    0.005 then leaves more CPU time to the engine."""

    @property
    def served_group(self) -> str:
        return self.group or self.pool

    @property
    def reachable_at(self) -> str:
        return self.address or self.listen

    @property
    def adapter_disk_bytes(self) -> int | None:
        return None if self.adapter_disk_mib is None else self.adapter_disk_mib << 20

    @property
    def writes_slabs(self) -> bool:
        return self.adapter_disk_mib is not None or not self.disk_limit

    @property
    def api_server(self) -> str:
        host = self.kubernetes_host
        return f"https://{host_and_port(host, self.kubernetes_port)}" if host else ""

    @property
    def adapter_volumes(self) -> Path | None:
        return Path(self.volumes or CLUSTER_VOLUMES) if self.volumes or self.kubernetes_host else None

    def model_folder(self) -> Path:
        """The base model's folder on this machine. Raises an error that says what is missing."""
        folder = folder_of(self.model_uri)
        if folder is None:
            raise SetupError(
                f"The runner cannot read the model {self.model_uri!r}. Set MOTET_RUNNER_MODEL_URI to {EXAMPLES}."
            )
        if not folder.is_dir():
            raise ModelFolderError(f"There is no model folder {folder}. Correct model.uri of the pool {self.pool}.")
        return self.check_model(folder)

    @staticmethod
    def check_model(folder: Path) -> Path:
        if not (folder / "config.json").is_file():
            raise ModelFolderError(
                f"{folder} has no config.json, so it is not a model folder. It must have the files that "
                "save_pretrained() writes."
            )
        if not any(folder.glob("*.safetensors")):
            raise ModelFolderError(
                f"{folder} has no *.safetensors, and Motet reads no other weights. Save the model again with "
                "save_pretrained()."
            )
        return folder

    def engine_config(self, model: Path) -> EngineConfig:
        """Each setting with the name of an option of EngineConfig sets this option."""
        options = self.model_dump(include={option.name for option in fields(EngineConfig)})
        trace = self.step_trace.replace("{instance}", self.instance)
        options |= {
            "model": model,
            "kernel_cache": self.kernel_cache.expanduser(),
            "step_trace": Path(trace) if trace else None,
            "tpot_seconds": self.tpot_milliseconds / 1000 if self.tpot_milliseconds is not None else None,
        }
        return EngineConfig(**options)
