"""Runs in vLLM's environment, for tests: `python generate_process.py`. Answers as vLLM alone does.

The model, the adapters and the requests come on stdin, pickled: (model, {number: folder}, [(prompt, adapter's number or
0)], tokens). The answers' tokens go to stdout.
"""

import os
import pickle
import sys

from motet_runner.external.vllm.__main__ import VARIABLES


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.environ |= VARIABLES
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model, folders, requests, tokens = pickle.load(sys.stdin.buffer)
    llm = LLM(
        model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512, kv_cache_memory_bytes=4 << 20,
        enable_lora=True, max_loras=len(folders) + 1, max_lora_rank=16,
    )  # fmt: skip
    adapters = {number: LoRARequest(str(number), number, folder) for number, folder in folders.items()}
    found = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt, _ in requests],
        SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False),
        lora_request=[adapters.get(number) for _, number in requests],
        use_tqdm=False,
    )
    pickle.dump([list(one.outputs[0].token_ids) for one in found], answers)
    answers.flush()


if __name__ == "__main__":
    main()
