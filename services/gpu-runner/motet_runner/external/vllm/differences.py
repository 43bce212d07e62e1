"""What an engine with vLLM does not do, or does otherwise than ours.

`docs/guides/vllm.md` has each sentence, and the contract suite makes no other exceptions.
"""

from collections.abc import Mapping

from motet_runner.external.vllm.options import REFUSED

DIFFERENCES: Mapping[str, str] = {
    **{name: f"`{name}` is refused: {why}." for name, why in REFUSED.items()},
    "high temperature": "A `temperature` above 2 is refused.",
    "bias and penalty": "`logit_bias` together with `repetition_penalty` is refused: vLLM computes them in another "
    "order.",
    "groups": "A request that is refused goes to a runner with Motet's engine, if the group has one.",
    "scales": "DoRA (`use_dora`), biases on lora_B (`lora_bias`) and trained biases are refused: the plain adapter "
    "that vLLM gets does not hold them yet.",
    "linears": "A proof looks at log probabilities: the adapter must move those of a short text. vLLM shows no "
    "linear's own result, so that nothing else is proved; recorded answers are compared as everywhere.",
    "temperature": "A temperature between 0 and 0.01 counts as 0.01.",
    "seed": "The same seed gives the same answer while the answer is neither parked, moved nor left out of an "
    "iteration, and no adapter is proved beside it. Afterwards it goes on with other noise.",
    "host memory": "A parked request is computed again; its KV is not copied to host memory.",
    "prefix cache": "vLLM finds the prefixes. `motet status` and the scheduler know nothing of them, and "
    "`cached_tokens` is 0. With `engine.prefixCache: false`, a request finds only what was computed for itself.",
    "no prefix cache": "A model for which vLLM has no prefix cache is refused at the start.",
    "exact mode": "There is no exact mode: `kernels` of a runner may not be `exact`.",
    "settings": "`decode_slowdown`, all other `kernels`, `kernel_cache`, `compiler`, `adapter_dtype`, "
    "`host_kv_mib`, `host_adapters_mib`, `plan_ahead` and `step_trace` of a runner have no effect.",
    "numbers": "Results that are not finite are not noticed.",
    "layers": "A model with layers of several kinds, as with and without a sliding window, is refused at the start.",
}
"""By what it is about"""
