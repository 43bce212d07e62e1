"""What an engine with vLLM does not do, or does otherwise than ours.

`docs/guides/vllm.md` has each sentence, and the contract suite makes no other exceptions.
"""

from collections.abc import Mapping

from motet_runner.external.vllm.options import REFUSED

DIFFERENCES: Mapping[str, str] = {
    "structured output": "A request with a grammar, `allowed_token_ids` or `bad_words` goes to a runner with Motet's "
    "engine, and is refused if its group has none.",
    **{name: f"`{name}` is refused: {why}." for name, why in REFUSED.items()},
    "high temperature": "A `temperature` above 2 is refused.",
    "bias and penalty": "`logit_bias` together with `repetition_penalty` is refused: vLLM computes them in another "
    "order.",
    "groups": "These are refused too if another runner of the group has Motet's engine, and would serve them.",
    "temperature": "A temperature between 0 and 0.01 counts as 0.01.",
    "seed": "The same seed gives the same answer while the answer is neither parked nor moved. Afterwards it goes on "
    "with other noise.",
    "host memory": "A parked request is computed again; its KV is not copied to host memory.",
    "prefix cache": "vLLM finds the prefixes. `motet status` and the scheduler know nothing of them, and "
    "`cached_tokens` is 0.",
    "settings": "`decode_slowdown`, `kernels`, `adapter_dtype`, `host_kv_mib` and `step_trace` of a runner have no "
    "effect.",
    "numbers": "Results that are not finite are not noticed.",
    "layers": "A model with layers of several kinds, as with and without a sliding window, is refused at the start.",
    "parallel": "One runner uses one GPU.",
}
"""By what it is about"""
