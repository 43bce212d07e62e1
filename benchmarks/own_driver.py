"""Runs the product's engine, as a library, for `benchmarks.vllm_peer`, in a process of its own.

It understands the questions of `benchmarks.vllm_driver`. "load" also has "kernels", "threads" or null, "cache" and
"kv_mib".
"""

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.vllm_driver import serve
from motet_runner.offline import OfflineEngine, Request, Sampling


class Own:
    def load(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._offline = OfflineEngine(
            asked["model"],
            adapters={str(number): folder for number, folder in enumerate(asked["adapters"])},
            device="cpu",
            dtype=asked["dtype"],
            kernels=asked["kernels"],
            kernel_cache=Path(asked["cache"]),
            kv_cache_mib=asked["kv_mib"],
            max_model_length=asked["length"],
            max_concurrent_sequences=asked["sequences"],
            max_resident_adapters=max(1, len(asked["adapters"])),
            max_lora_rank=asked["rank"],
            threads=asked["threads"],
            prefix_cache=False,
        )
        return {"threads": torch.get_num_threads(), "fused": self._offline.engine.diagnostics.loaded.fused is not None}

    def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        output, margins = asked["output"], asked["margins"]
        sampling = Sampling(max_tokens=output, ignore_eos=True, logprobs=margins, top_logprobs=2 if margins else 0)
        requests = [
            Request(prompt=prompt, adapter="" if adapter is None else str(adapter), sampling=sampling)
            for prompt, adapter in zip(asked["prompts"], asked["adapters"], strict=True)
        ]
        began = time.perf_counter()
        answers = sorted(self._offline.run(requests), key=lambda answer: answer.number)
        answered: dict[str, Any] = {"seconds": time.perf_counter() - began}
        if failed := [answer.error for answer in answers if answer.error is not None]:
            raise failed[0]
        answered["tokens"] = [answer.tokens for answer in answers]
        if margins:
            best = [answer.logprobs[0].top for answer in answers]
            answered["margins"] = [first - second for (_, first), (_, second) in best]
        return answered


if __name__ == "__main__":
    serve(Own())
