"""Parameters of other servers that this one does not support. It refuses them if ignoring them would change the answer
or weaken the client's privacy. Other unknown parameters are ignored and counted. Pure.
"""

from collections.abc import Mapping
from typing import Any

from motet.errors import UnsupportedParameter
from motet.sampling import IN_BODIES

_NOT_SUPPORTED = "it is not supported"
_ADAPTER = "name the adapter in model; GET /v1/models lists its names"
_TEMPLATE = "only /v1/chat/completions and /tokenize take it, where the model's pool permits it"

UNSUPPORTED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    # Which model answers.
    "adapter_id": (_ADAPTER, ()),
    "adapter_source": (_ADAPTER, ()),
    "lora_path": (_ADAPTER, ()),
    # Which tokens are allowed.
    "logits_processors": (_NOT_SUPPORTED, ([],)),
    "vllm_xargs": (_NOT_SUPPORTED, ({},)),
    "custom_params": (_NOT_SUPPORTED, ({},)),
    "custom_logit_processor": (_NOT_SUPPORTED, ()),
    "guided_whitespace_pattern": ("white space between the parts of JSON is bounded as it is", ()),
    # How the answer is sampled and searched.
    "do_sample": ("set temperature to 0 for the most likely tokens", (True,)),
    "typical_p": (_NOT_SUPPORTED, (1, 1.0)),
    "no_repeat_ngram_size": ("it is not supported; see repetition_penalty", (0,)),
    "use_beam_search": (_NOT_SUPPORTED, (False,)),
    "length_penalty": ("beam search is not supported", (1,)),
    "early_stopping": ("beam search is not supported", (False,)),
    "thinking_token_budget": (_NOT_SUPPORTED, ()),
    # Where the answer ends.
    "max_new_tokens": ("use max_tokens", ()),
    "stop_sequences": ("use stop", ([],)),
    "stop_regex": ("use stop", ([],)),
    "no_stop_trim": ("use include_stop_str_in_output", (False,)),
    # What the model reads.
    "chat_template": (_TEMPLATE, ()),
    "prompt_embeds": (_NOT_SUPPORTED, ()),
    "mm_processor_kwargs": (_NOT_SUPPORTED, ({},)),
    "web_search_options": (_NOT_SUPPORTED, ()),
    "session_params": (_NOT_SUPPORTED, ({},)),
    # What the response contains.
    "return_hidden_states": (_NOT_SUPPORTED, (False,)),
    "echo": ("a chat does not come back; /v1/completions has echo", (False,)),
    "prompt_logprobs": ("only chats and plain completions have them", (False,)),
    "detokenize": ("answers are always text", (True,)),
    "audio": ("answers are always text", ()),
    # Who may share its computed state.
    "kv_transfer_params": (_NOT_SUPPORTED, ({},)),
    "extra_key": ("use cache_salt", ("",)),
    # Which servers share the work.
    "bootstrap_host": (_NOT_SUPPORTED, ()),
    "bootstrap_port": (_NOT_SUPPORTED, ()),
    "bootstrap_room": (_NOT_SUPPORTED, ()),
}
"""By name: the reason, and the values that have no effect. null never has one."""


def refuse_known_to_others(extra: Mapping[str, Any]) -> None:
    for name in extra.keys() & UNSUPPORTED.keys():
        if name in IN_BODIES:  # what `motet.sampling` declares is supported
            continue
        why, harmless = UNSUPPORTED[name]
        value = extra[name]
        if value is not None and not any(_is_same(value, one) for one in harmless):
            raise UnsupportedParameter(f"{name}: {why}", param=name)


def _is_same(value: Any, other: Any) -> bool:
    """To Python, 0 equals false: vLLM's `prompt_logprobs: 0` asks for something."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
