"""Runs the product's engine for `benchmarks.vllm_peer`, in a process of its own.

It understands the questions of `benchmarks.vllm_driver`. "load" also has "kernels", "threads" or null, "cache" and
"kv_mib".
"""

import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

from benchmarks.vllm_driver import serve
from motet.domain import BASE, Digest, RequestId, pages_for
from motet_runner.adapters.certification import certify
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, NewSequence, Sampling


def digest(number: int | None) -> Digest:
    return BASE if number is None else Digest(f"sha256:{number}")


class Own:
    def __init__(self) -> None:
        self._numbers = count()

    def load(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._engine = Engine(
            EngineConfig(
                model=Path(asked["model"]),
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
        )
        for number, folder in enumerate(asked["adapters"]):
            self._engine.load_adapter(digest(number), certify(Path(folder), self._engine.info).layout)
        return {"threads": torch.get_num_threads(), "fused": self._engine._loaded.fused is not None}

    def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        output, margins = asked["output"], asked["margins"]
        sampling = Sampling(max_tokens=output, ignore_eos=True, logprobs=margins, top_logprobs=2 if margins else 0)
        sequences = [
            NewSequence(
                request=RequestId(str(next(self._numbers))),
                epoch=1,
                prompt=tuple(prompt),
                adapter=digest(number),
                promise=pages_for(len(prompt) + output),
                sampling=sampling,
            )
            for prompt, number in zip(asked["prompts"], asked["adapters"], strict=True)
        ]
        tokens: dict[str, list[int]] = {sequence.request: [] for sequence in sequences}
        firsts = dict[str, float]()
        began = time.perf_counter()
        for sequence in sequences:
            self._engine.add(sequence)
        while self._engine.has_work():
            for part in self._engine.step().sequences:
                if part.error is not None:
                    raise part.error
                tokens[part.request] += part.tokens
                if margins and part.index == 0:
                    (_, best), (_, second) = part.logprobs[0].top
                    firsts[part.request] = best - second
        seconds = time.perf_counter() - began
        answer: dict[str, Any] = {"seconds": seconds, "tokens": [tokens[sequence.request] for sequence in sequences]}
        if margins:
            answer["margins"] = [firsts[sequence.request] for sequence in sequences]
        return answer


if __name__ == "__main__":
    serve(Own())
