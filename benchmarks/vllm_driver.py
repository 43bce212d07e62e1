"""Runs vLLM for `benchmarks.vllm_peer`, with the Python of vLLM's own environment. It imports nothing of the product.

Each line of stdin is a question, and each line of stdout an answer, as JSON:

    {"do": "load", "model", "adapters": [folder], "rank", "length", "sequences", "dtype", "eager"}
        -> {"versions", "libraries", "threads"}; with "slots" fewer adapters are in memory at a time
    {"do": "generate", "prompts": [[token]], "adapters": [number or null], "output", "margins": bool, "temperature"}
        -> {"seconds", "tokens": [[token]]}, and with "margins" by how much the first token of each was the likeliest
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PRELOADED = ("tcmalloc", "iomp5", "gomp")


def libraries() -> list[str]:
    """Those that are in fact in this process."""
    loaded = Path("/proc/self/maps").read_text()
    return [name for name in PRELOADED if f"lib{name}" in loaded]


class Peer:
    def load(self, asked: dict[str, Any]) -> dict[str, Any]:
        vllm = importlib.import_module("vllm")
        lora = importlib.import_module("vllm.lora.request").LoRARequest
        self._sampling = vllm.SamplingParams
        self._adapters = [lora(f"a{i}", i + 1, folder) for i, folder in enumerate(asked["adapters"])]
        adapters = len(self._adapters)
        slots = asked.get("slots", adapters)
        with_lora = {
            "enable_lora": True,
            "max_loras": slots,
            "max_cpu_loras": slots,
            "max_lora_rank": asked["rank"],
        }
        self._llm = vllm.LLM(
            model=asked["model"],
            dtype=asked["dtype"],
            enforce_eager=asked["eager"],
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=asked["length"],
            max_num_seqs=asked["sequences"],
            **(with_lora if adapters else {}),
        )
        torch = importlib.import_module("torch")
        return {
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "libraries": libraries(),
            "threads": torch.get_num_threads(),
        }

    def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        sampling = self._sampling(
            temperature=asked["temperature"],
            max_tokens=asked["output"],
            ignore_eos=True,
            detokenize=False,
            logprobs=2 if asked["margins"] else None,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        chosen = [None if number is None else self._adapters[number] for number in asked["adapters"]]
        began = time.perf_counter()
        done = self._llm.generate(prompts, sampling, use_tqdm=False, lora_request=chosen if self._adapters else None)
        seconds = time.perf_counter() - began
        answer: dict[str, Any] = {"seconds": seconds, "tokens": [list(one.outputs[0].token_ids) for one in done]}
        if asked["margins"]:
            firsts = [sorted((at.logprob for at in one.outputs[0].logprobs[0].values()), reverse=True) for one in done]
            answer["margins"] = [best - second for best, second, *_ in firsts]
        return answer


def serve(engine: Any) -> None:
    """Answer the questions of stdin with the engine's methods."""
    # Engines print and log to stdout. Only answers may go there.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(engine, asked["do"])(asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(Peer())
