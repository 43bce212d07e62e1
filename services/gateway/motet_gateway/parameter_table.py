"""The parameters that clients of other servers send, and what each does here, as the code that reads them declares it.
Pure.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from motet.sampling import IN_BODIES
from motet_gateway.grammars.parameters import FIELDS as GRAMMAR_FIELDS
from motet_gateway.parameters import ChatBody, ChoicesBody, CompletionBody
from motet_gateway.unsupported_parameters import UNSUPPORTED


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OPENAI = _names(
    "model stream stream_options n max_tokens stop temperature top_p frequency_penalty presence_penalty logit_bias "
    "seed user logprobs"
)
_OPENAI_CHAT = _OPENAI | _names(
    "messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls functions function_call "
    "response_format modalities audio prediction web_search_options metadata store reasoning_effort verbosity "
    "service_tier safety_identifier prompt_cache_key prompt_cache_retention"
)
_OPENAI_COMPLETION = _OPENAI | _names("prompt echo suffix best_of")
_VLLM = _names(
    "use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output "
    "ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side "
    "allowed_token_ids bad_words prompt_logprobs add_special_tokens response_format structured_outputs guided_json "
    "guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern priority request_id "
    "logits_processors return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs"
)
_VLLM_CHAT = _names(
    "echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs "
    "mm_processor_kwargs thinking_token_budget include_reasoning"
)
_SGLANG = _names(
    "top_k min_p min_tokens regex ebnf json_schema structural_tag repetition_penalty stop_token_ids stop_regex "
    "no_stop_trim ignore_eos skip_special_tokens lora_path session_params return_hidden_states rid extra_key "
    "cache_salt priority custom_params custom_logit_processor bootstrap_host bootstrap_port bootstrap_room "
    "data_parallel_rank"
)
_SGLANG_CHAT = _names("continue_final_message chat_template_kwargs separate_reasoning stream_reasoning")
_LORAX = _names(
    "adapter_id adapter_source max_new_tokens stop_sequences do_sample typical_p no_repeat_ngram_size grammar"
)

CHATS: Mapping[str, frozenset[str]] = {
    "OpenAI": _OPENAI_CHAT,
    "vLLM": _OPENAI_CHAT | _VLLM | _VLLM_CHAT,
    "SGLang": _OPENAI_CHAT | _SGLANG | _SGLANG_CHAT,
    "LoRAX, TGI": _OPENAI_CHAT | _LORAX,
}
COMPLETIONS: Mapping[str, frozenset[str]] = {
    "OpenAI": _OPENAI_COMPLETION,
    "vLLM": _OPENAI_COMPLETION | _VLLM | _names("prompt_embeds"),
    "SGLang": _OPENAI_COMPLETION | _SGLANG,
    "LoRAX, TGI": _OPENAI_COMPLETION | _LORAX,
}
"""What clients of each server send, also where that server ignores it"""


class Effect(StrEnum):
    ACTS = "acts"
    NOTHING = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    servers: tuple[str, ...]
    effect: Effect
    why: str = ""
    harmless: tuple[object, ...] = ()
    """Values of a refused one that are accepted, because they ask for nothing"""


def rows(body: type[ChoicesBody]) -> Iterator[Row]:
    """Raises LookupError for a parameter that nobody has decided about."""
    known = CHATS if issubclass(body, ChatBody) else COMPLETIONS
    for name in sorted(frozenset[str]().union(*known.values())):
        servers = tuple(server for server, names in known.items() if name in names)
        if name in body.refused_here:
            yield Row(name, servers, Effect.REFUSED, body.refused_here[name])
        elif name in body.model_fields or name in GRAMMAR_FIELDS or name in IN_BODIES:
            yield Row(name, servers, Effect.ACTS)
        elif name in body.hints:
            yield Row(name, servers, Effect.NOTHING)
        else:
            why, harmless = UNSUPPORTED[name]
            yield Row(name, servers, Effect.REFUSED, why, harmless)


BODIES: Mapping[str, type[ChoicesBody]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
