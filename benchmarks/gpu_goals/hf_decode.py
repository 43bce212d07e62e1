"""A decode step of transformers' `generate`, in the modes that people use."""

import time
from typing import Any

import torch
import transformers

from benchmarks.gpu_goals.bench import Bench
from benchmarks.gpu_goals.models import Shape

MODES: dict[str, float | None] = {"hf_eager": 5.0, "hf_compiled": 1.3, "hf_continuous": 1.3}
"""How many times longer each must take"""
ROUNDS = 3
TOKENS = 33
"""More than one, so that the prompt's time can be taken off"""


class HfDecode:
    def __init__(self, bench: Bench, shape: Shape, rows: int, context: int) -> None:
        self._bench = bench
        config = transformers.LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.feed_forward,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=2 * (context + TOKENS),
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=None,
            dtype=torch.float32 if bench.rehearsal else bench.dtype,
        )
        with bench.device:
            self._model = transformers.AutoModelForCausalLM.from_config(config).eval()
        size = (rows, context)
        self._prompts = torch.randint(1, shape.vocabulary, size, generator=bench.generator, device=bench.device)

    def microseconds(self, mode: str) -> list[float]:
        """Of a step, in each round"""
        tokens = 3 if self._bench.rehearsal else TOKENS
        rounds = 1 if self._bench.rehearsal else ROUNDS
        if mode == "hf_continuous":
            return [self._continuous(tokens) for _ in range(rounds)]
        more: dict[str, Any] = {}
        if mode == "hf_compiled":
            more = {"cache_implementation": "static", "disable_compile": self._bench.rehearsal}
        self._seconds(tokens, more)  # compiles
        steps = []
        for _ in range(rounds):
            one = self._seconds(1, more)
            steps.append((self._seconds(tokens, more) - one) / (tokens - 1) * 1e6)
        return steps

    def _seconds(self, tokens: int, more: dict[str, Any]) -> float:
        self._wait()
        began = time.perf_counter()
        self._model.generate(
            self._prompts, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, **more
        )
        self._wait()
        return time.perf_counter() - began

    def _continuous(self, tokens: int) -> float:
        """It says itself when each token came: what it takes to begin and to end is not measured."""
        given: dict[str, Any] = {}
        if self._bench.rehearsal:
            given["continuous_batching_config"] = transformers.ContinuousBatchingConfig(
                num_blocks=8, max_batch_tokens=64, use_cuda_graph=False
            )
        config = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        model: Any = self._model
        answers = model.generate_batch(
            inputs=self._prompts.tolist(), generation_config=config, record_timestamps=True, warmup=True, **given
        )
        complete = [answer for answer in answers.values() if len(answer.generated_tokens) == tokens]
        if len(complete) != len(self._prompts):
            raise RuntimeError(f"{len(complete)} of {len(self._prompts)} requests were answered")
        began = max(answer.timestamps[0] for answer in complete)
        ended = max(answer.timestamps[-1] for answer in complete)
        return float((ended - began) / (tokens - 1) * 1e6)

    def _wait(self) -> None:
        if self._bench.device.type == "cuda":
            torch.cuda.synchronize()
