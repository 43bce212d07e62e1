"""vLLM's `LLMEngine`, in this process. No other module imports vllm."""

import os
from pathlib import Path
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.version import __version__

from motet.errors import ModelFolderError
from motet_runner.external.vllm.driven import Ask, Facts, Produced
from motet_runner.interface import EngineConfig, Logprobs

MIB = 1024 * 1024
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
        if on_cpu:
            cores = sorted(os.sched_getaffinity(0))
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores[: config.threads])))
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
            max_num_batched_tokens=_budget(config),
            block_size=BLOCK_TOKENS_ON_CPU if on_cpu else BLOCK_TOKENS,
            kv_cache_memory_bytes=None if kv_mib is None else int(kv_mib * MIB),
            gpu_memory_utilization=config.memory_utilization_percent / 100,
            enable_prefix_caching=config.prefix_cache,
            enable_chunked_prefill=True,
            async_scheduling=False,  # the plan must know all tokens before the next iteration
            enable_lora=True,
            max_loras=slots,
            max_cpu_loras=slots,
            max_lora_rank=next(rank for rank in RANKS if rank >= config.max_lora_rank),
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._adapters: dict[int, LoRARequest] = {}
        self.facts = self._facts()

    def _facts(self) -> Facts:
        config = self._engine.vllm_config
        model, cache = config.model_config, config.cache_config
        text = model.hf_text_config
        heads, width = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
        return Facts(
            version=__version__,
            blocks=(cache.num_gpu_blocks or 1) - 1,  # it keeps the first one for itself
            block_tokens=cache.block_size,
            groups=len(self._engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups),
            architecture=model.architecture,
            layers=text.num_hidden_layers,
            vocabulary=model.get_vocab_size(),
            max_model_length=model.max_model_len,
            bytes_per_token=2 * text.num_hidden_layers * heads * width * model.dtype.itemsize,
            dtype=str(model.dtype).removeprefix("torch."),
            device=current_platform.device_type,
            shares_prefixes=bool(cache.enable_prefix_caching),
        )

    def check(self, options: dict[str, Any]) -> None:
        config = self._engine.vllm_config
        SamplingParams(**options).verify(
            config.model_config, config.speculative_config, config.structured_outputs_config, None
        )

    def add(self, ask: Ask) -> None:
        options = SamplingParams(**ask.options, output_kind=RequestOutputKind.DELTA)
        prompt = tokens_input(list(ask.tokens), cache_salt=ask.salt)
        adapter = self._adapters[ask.adapter] if ask.adapter else None
        self._engine.add_request(ask.name, prompt, options, lora_request=adapter)

    def abort(self, names: list[str]) -> None:
        self._engine.abort_request(names)

    def step(self) -> list[Produced]:
        return [_produced(one) for one in self._engine.step()]

    def load_adapter(self, number: int, folder: Path) -> None:
        request = LoRARequest(str(number), number, str(folder))
        if not self._engine.add_lora(request):
            raise ValueError("add_lora gives no reason")
        self._adapters[number] = request

    def remove_adapter(self, number: int) -> None:
        del self._adapters[number]
        self._engine.remove_lora(number)


def _budget(config: EngineConfig) -> int:
    """The tokens of an iteration: a piece of a prompt with the last block that is computed again, and the decodes."""
    return config.prefill_chunk_tokens + BLOCK_TOKENS_ON_CPU + config.max_concurrent_sequences


def _produced(output: Any) -> Produced:
    one = output.outputs[0]
    (token,) = one.token_ids
    logprobs = None
    if one.logprobs:
        (at,) = one.logprobs
        top = sorted(((number, each.logprob) for number, each in at.items()), key=lambda each: -each[1])
        logprobs = Logprobs(at[token].logprob, tuple(top))
    return Produced(output.request_id, token, logprobs, output.finished)
