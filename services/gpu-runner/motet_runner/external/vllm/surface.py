"""vLLM's `LLMEngine`, in this process. Beside the two logits processors, no other module imports vllm."""

import os
import secrets
from pathlib import Path
from typing import Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.version import __version__

from motet.errors import ModelFolderError
from motet_runner.execute.tune.cores import usable_cores
from motet_runner.external.vllm.driven import Ask, Facts, Produced
from motet_runner.external.vllm.linears import by_kind, linears_of
from motet_runner.external.vllm.row_changes import RowChanges
from motet_runner.external.vllm.worker_adapters import WorkerAdapters
from motet_runner.external.vllm.workers import EXTENSION, Watch, bind_cores, threads_of_each
from motet_runner.interface import EngineConfig, Logprobs

MIB = 1024 * 1024
TRIED_TOGETHER = 2
"""Requests of the trial at the start"""
KV_BYTES = {"float16": 2, "bfloat16": 2}
"""Of a number of keys and values, if it is another type than the model's"""
USUAL_KV_MIB = 512
"""On a CPU, as for our engine"""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The highest ranks that vLLM can be started with"""
BLOCK_TOKENS = 16
BLOCK_TOKENS_ON_CPU = 32
"""vLLM's attention on a CPU is slower with smaller blocks."""


class Surface:
    """See `Driven`."""

    def __init__(self, config: EngineConfig) -> None:
        on_cpu = current_platform.is_cpu()
        if config.device not in ("auto", current_platform.device_type):
            raise ModelFolderError(
                f"engine.device is {config.device}, and this vLLM computes on {current_platform.device_type}."
            )
        workers = config.tensor_parallel * config.stages
        if on_cpu:
            _check_cpu(config)
            os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the pool's kvCacheMiB
            _divide_cores(config, workers)
        elif workers > torch.cuda.device_count():
            raise ModelFolderError(
                f"engine.parallel needs {workers} GPUs, and this runner has {torch.cuda.device_count()}."
            )
        # On a CPU without Triton, rows of the base model get the adapter in the last slot. Slots are filled in order:
        # this one stays empty.
        slots = config.max_resident_adapters + on_cpu
        kv_mib = config.kv_cache_mib or (USUAL_KV_MIB if on_cpu else None)
        arguments = EngineArgs(
            model=str(config.model),
            skip_tokenizer_init=True,
            trust_remote_code=False,
            dtype=config.dtype,
            max_model_len=config.max_model_length,
            max_num_seqs=config.max_concurrent_sequences,
            max_num_batched_tokens=_budget(config, BLOCK_TOKENS_ON_CPU if on_cpu else BLOCK_TOKENS),
            block_size=BLOCK_TOKENS_ON_CPU if on_cpu else BLOCK_TOKENS,
            tensor_parallel_size=config.tensor_parallel,
            pipeline_parallel_size=config.stages,
            distributed_executor_backend="mp" if workers > 1 else None,
            worker_extension_cls=EXTENSION if workers > 1 else "",
            kv_cache_dtype=config.kv_cache_dtype,
            enforce_eager=config.enforce_eager,
            attention_backend=config.attention_backend,
            kv_cache_memory_bytes=None if kv_mib is None else int(kv_mib * MIB),
            gpu_memory_utilization=config.memory_utilization_percent / 100,
            enable_prefix_caching=True,  # a row that was left out finds its own KV, whatever others may share
            enable_chunked_prefill=True,
            async_scheduling=False,  # the plan must know all tokens before the next iteration
            enable_lora=True,
            max_loras=slots,
            max_cpu_loras=slots,
            max_lora_rank=next(rank for rank in RANKS if rank >= config.max_lora_rank),
            # Without them also the embedding and the head, in each iteration: no adapter that is checked has those.
            lora_target_modules=sorted(by_kind(linears_of(config.model))),
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=secrets.randbits(31),  # of requests without one: two runners must not draw alike
        )
        given = arguments.create_engine_config()
        runner = "v2" if given.use_v2_model_runner else "v1"
        given.model_config.logits_processors = [f"motet_runner.external.vllm.processor_{runner}:Processor"]
        watch = Watch(workers) if workers > 1 else None
        self._engine = LLMEngine.from_vllm_config(given, disable_log_stats=True)
        if watch is not None:
            watch.loaded()
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._stopped: set[tuple[str, int]] = set()
        self._adapters: dict[int, LoRARequest] = {}
        self._workers = WorkerAdapters(self._ask_workers) if workers > 1 else None
        self.facts = self._facts()
        rows = max(TRIED_TOGETHER, config.max_concurrent_sequences)
        self._changes = RowChanges(rows, self.facts.vocabulary, self.facts.max_model_length)

    def _facts(self) -> Facts:
        config = self._engine.vllm_config
        model, cache = config.model_config, config.cache_config
        text = model.hf_text_config
        gpu = torch.cuda.get_device_properties(0) if current_platform.device_type == "cuda" else None
        heads, width = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
        of_number = 1 if cache.cache_dtype.startswith("fp8") else KV_BYTES.get(cache.cache_dtype, model.dtype.itemsize)
        return Facts(
            version=__version__,
            blocks=(cache.num_gpu_blocks or 1) - 1,  # it keeps the first one for itself
            block_tokens=cache.block_size,
            groups=len(self._scheduler.kv_cache_config.kv_cache_groups),
            architecture=model.architecture,
            layers=text.num_hidden_layers,
            vocabulary=model.get_vocab_size(),
            max_model_length=model.max_model_len,
            bytes_per_token=2 * model.get_num_layers(config.parallel_config) * heads * width * of_number,
            dtype=str(model.dtype).removeprefix("torch."),
            device=current_platform.device_type,
            shares_prefixes=bool(cache.enable_prefix_caching),
            noise_by_position=config.use_v2_model_runner,
            quantization=str(model.quantization or (cache.cache_dtype if of_number == 1 else "")),
            gpu=gpu.name if gpu is not None else "",
            gpu_number=str(getattr(gpu, "uuid", "")),
        )

    def check(self, options: dict[str, Any]) -> None:
        config = self._engine.vllm_config
        SamplingParams(**options).verify(
            config.model_config, config.speculative_config, config.structured_outputs_config, None
        )

    def add(self, ask: Ask) -> None:
        options = SamplingParams(
            **ask.options, extra_args=self._changes.begin(ask), output_kind=RequestOutputKind.DELTA
        )
        prompt = tokens_input(list(ask.tokens), cache_salt=ask.salt)
        adapter = self._adapters[ask.adapter] if ask.adapter else None
        self._engine.add_request(ask.name, prompt, options, lora_request=adapter)

    def allow(self, name: str, allowed: bytes) -> None:
        self._changes.allow(name, allowed)

    def abort(self, names: list[str]) -> None:
        self._engine.abort_request(names)
        self._changes.end(names)

    def step(self) -> list[Produced]:
        outputs = self._engine.step()
        if self._scheduler.waiting:
            waiting = ((one.request_id, one.num_preemptions) for one in self._scheduler.waiting)
            self._stopped |= {one for one in waiting if one[1]}
        produced = [_produced(one) for one in outputs]
        self._changes.take(produced)
        return produced

    def blocks_in_use(self) -> int:
        return self.facts.blocks - int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def stops(self) -> int:
        return len(self._stopped)

    def load_adapter(self, number: int, folder: Path) -> None:
        request = LoRARequest(lora_name=str(number), lora_int_id=number, lora_path=str(folder))
        if self._workers is not None:
            self._workers.load(request)
        else:
            self._load_alone(request)
        self._adapters[number] = request

    def _load_alone(self, request: LoRARequest) -> None:
        try:
            if not self._engine.add_lora(request):
                raise ValueError("add_lora gives no reason")
        except Exception:
            self._engine.remove_lora(request.lora_int_id)  # vLLM gives it a slot before it reads the weights
            raise

    def _ask_workers(self, method: str, argument: Any) -> list[Any]:
        answers: list[Any] = self._engine.collective_rpc(method, args=(argument,))
        return answers

    def remove_adapter(self, number: int) -> None:
        del self._adapters[number]
        if self._workers is not None:
            self._workers.remove(number)
        else:
            self._engine.remove_lora(number)


def _divide_cores(config: EngineConfig, workers: int) -> None:
    usable, cores = usable_cores(), sorted(os.sched_getaffinity(0))
    threads = threads_of_each(usable, len(cores), config.threads, workers)
    torch.set_num_threads(threads)
    if workers > 1:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        alone = cores if usable == len(cores) else []  # with a quota, other containers have the same cores
        bind_cores(alone, threads, workers)


def _check_cpu(config: EngineConfig) -> None:
    if config.stages > 1:
        # vLLM makes the memory for what comes from the stage before when it compiles, which it does not with adapters.
        raise ModelFolderError(
            f"engine.parallel.stages is {config.stages}, and vLLM on a CPU computes adapters in one stage. Set "
            "engine.parallel.tensor instead."
        )
    if config.kv_cache_dtype in ("float16", "bfloat16"):
        # It takes them, and computes other tokens.
        raise ModelFolderError(
            f"engine.vllm.kvCacheDtype is {config.kv_cache_dtype}, and vLLM on a CPU computes auto and fp8. Leave it "
            "out."
        )
    if config.attention_backend is not None:
        raise ModelFolderError(
            f"engine.vllm.attentionBackend is {config.attention_backend}, and vLLM on a CPU has one of its own. Leave "
            "it out."
        )


def _budget(config: EngineConfig, block: int) -> int:
    """The tokens of an iteration: a piece of a prompt with the last block that is computed again, and the last block of
    each other row: all of them may come back at once. If vLLM cut one, the others would have to come back again."""
    return config.prefill_chunk_tokens + block * (1 + config.max_concurrent_sequences)


def _produced(output: Any) -> Produced:
    one = output.outputs[0]
    (token,) = one.token_ids
    logprobs = None
    if one.logprobs:
        (at,) = one.logprobs
        top = sorted(((number, each.logprob) for number, each in at.items()), key=lambda each: -each[1])
        logprobs = Logprobs(at[token].logprob, tuple(top))
    return Produced(output.request_id, token, logprobs, output.finished, _of_prompt(output))


def _of_prompt(output: Any) -> tuple[float, ...]:
    if not output.prompt_logprobs:
        return ()
    tokens = output.prompt_token_ids[1:]
    return tuple(at[token].logprob for at, token in zip(output.prompt_logprobs[1:], tokens, strict=True))
