"""What `surface` uses of vLLM, by name, and whether a version has it: read from its sources, without importing them."""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence

BY_PLACE = "/"
Members = Mapping[str, Sequence[str]]
"""Name → the parameters that are given, if it is called: those before BY_PLACE by their places, the others by name"""

ENGINE_ARGUMENTS = (
    "model", "skip_tokenizer_init", "trust_remote_code", "dtype", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes", "gpu_memory_utilization",
    "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "enable_lora", "max_loras",
    "max_cpu_loras", "max_lora_rank", "disable_log_stats", "use_tqdm_on_load", "tensor_parallel_size",
    "pipeline_parallel_size", "distributed_executor_backend", "worker_extension_cls", "kv_cache_dtype",
    "enforce_eager", "attention_backend", "seed", "lora_target_modules",
)  # fmt: skip
SAMPLING_OPTIONS = (
    "max_tokens", "min_tokens", "temperature", "stop_token_ids", "ignore_eos", "repetition_penalty", "detokenize",
    "top_p", "top_k", "min_p", "seed", "logit_bias", "logprobs", "output_kind", "extra_args",
)  # fmt: skip
USED: Mapping[str, Mapping[str, Members]] = {
    "v1/engine/llm_engine.py": {
        "LLMEngine": {
            "from_vllm_config": ("vllm_config", BY_PLACE, "disable_log_stats"),
            "add_request": ("request_id", "prompt", "params", BY_PLACE, "lora_request"),
            "abort_request": ("request_ids", BY_PLACE),
            "step": (),
            "engine_core": (),
            "vllm_config": (),
            "add_lora": ("lora_request", BY_PLACE),
            "remove_lora": ("lora_id", BY_PLACE),
            "collective_rpc": ("method", BY_PLACE, "args"),
        }
    },
    "engine/arg_utils.py": {"EngineArgs": dict.fromkeys((*ENGINE_ARGUMENTS, "create_engine_config"), ())},
    "config/vllm.py": {"VllmConfig": {"use_v2_model_runner": ()}},
    "sampling_params.py": {
        "SamplingParams": dict.fromkeys(SAMPLING_OPTIONS, ())
        | {"verify": ("model_config", "speculative_config", "structured_outputs_config", "tokenizer", BY_PLACE)},
        "RequestOutputKind": {"DELTA": ()},
    },
    "inputs/engine.py": {"": {"tokens_input": ("prompt_token_ids", BY_PLACE, "cache_salt")}},
    "lora/request.py": {"LoRARequest": {"lora_name": (), "lora_int_id": (), "lora_path": ()}},
    "platforms/interface.py": {"Platform": {"is_cpu": (), "device_type": ()}},
    "outputs.py": {
        "RequestOutput": {"request_id": (), "outputs": (), "finished": ()},
        "CompletionOutput": {"token_ids": (), "logprobs": ()},
    },
    "config/model.py": {
        "ModelConfig": {
            "get_num_kv_heads": ("parallel_config", BY_PLACE),
            "get_num_layers": ("parallel_config", BY_PLACE),
            "get_head_size": (),
            "get_vocab_size": (),
            "architecture": (),
            "max_model_len": (),
            "hf_text_config": (),
            "logits_processors": (),
        }
    },
    "config/cache.py": {
        "CacheConfig": {"num_gpu_blocks": (), "block_size": (), "cache_dtype": (), "enable_prefix_caching": ()}
    },
    "v1/engine/core_client.py": {"InprocClient": {"engine_core": ()}},
    "v1/engine/core.py": {"EngineCore": {"scheduler": ()}},
    "v1/core/sched/scheduler.py": {"Scheduler": {"waiting": (), "kv_cache_config": (), "kv_cache_manager": ()}},
    "v1/core/kv_cache_manager.py": {"KVCacheManager": {"block_pool": ()}},
    "v1/core/block_pool.py": {"BlockPool": {"get_num_free_blocks": ()}},
    "v1/sample/logits_processor/interface.py": {
        "LogitsProcessor": {
            "is_argmax_invariant": (),
            "update_state": ("batch_update", BY_PLACE),
            "apply": ("logits", BY_PLACE),
        }
    },
    "v1/worker/gpu/sample/logits_processor/interface.py": {
        "LogitsProcessor": {
            "add_request": ("req_idx", "sampling_params", BY_PLACE),
            "apply_staged_writes": (),
            "apply": ("logits", "ctx", BY_PLACE),
        },
        "LogitsContext": {"idx_mapping_np": ()},
    },
    "v1/sample/logits_processor/builtin.py": {
        "": {"process_dict_updates": ("req_entries", "batch_update", "new_state", BY_PLACE)}
    },
    "v1/worker/worker_base.py": {
        "WorkerBase": {"add_lora": ("lora_request", BY_PLACE), "remove_lora": ("lora_id", BY_PLACE)}
    },
    "v1/request.py": {"Request": {"request_id": (), "num_preemptions": ()}},
}
"""By file of the package and by class; the class without a name is the module itself."""


def differing(read: Callable[[str], str | None]) -> list[str]:
    """What this vLLM lacks, or wants more of. `read`: the text of one of its files; None if there is no such file."""
    found = []
    for file, classes in USED.items():
        text = read(file)
        if text is None:
            found.append(f"there is no {file}")
            continue
        try:
            module = ast.parse(text)
        except SyntaxError:
            found.append(f"{file} is for a newer Python than this one")
            continue
        for owner, members in classes.items():
            scope = _class(module, owner) if owner else module
            prefix = f"{owner}." if owner else ""
            if scope is None:
                found.append(f"{file} has no {owner}")
                continue
            known = dict(_members(scope))
            for name, given in members.items():
                if name not in known:
                    found.append(f"{file} has no {prefix}{name}")
                elif (function := known[name]) is not None and given:
                    found += [f"{prefix}{name} {what}" for what in _unlike(function, given)]
    return found


def _class(module: ast.Module, name: str) -> ast.ClassDef | None:
    return next((one for one in module.body if isinstance(one, ast.ClassDef) and one.name == name), None)


def _members(scope: ast.ClassDef | ast.Module) -> Iterator[tuple[str, ast.FunctionDef | None]]:
    """With those that a constructor sets"""
    for one in scope.body:
        match one:
            case ast.FunctionDef():
                yield one.name, one
                if one.name == "__init__":
                    for target in ast.walk(one):
                        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                            yield target.attr, None
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, None
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name, None


def _unlike(function: ast.FunctionDef, given: Sequence[str]) -> Iterator[str]:
    arguments = function.args
    positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args) if one.arg not in ("self", "cls")]
    optional = set(positional[len(positional) - len(arguments.defaults) :]) if arguments.defaults else set()
    by_place_only = {one.arg for one in arguments.posonlyargs}
    named = {one.arg: default for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)}
    optional |= {name for name, default in named.items() if default is not None}
    has = [*positional, *named]
    names = [one for one in given if one != BY_PLACE]
    by_place = names[: given.index(BY_PLACE)] if BY_PLACE in given else []
    yield from (f"has no parameter {name}" for name in names if name not in has)
    yield from (f"needs {name}" for name in has if name not in names and name not in optional)
    yield from (f"has {name} by its place only" for name in names if name in by_place_only and name not in by_place)
    for place, name in enumerate(by_place):
        if name in has and positional[place : place + 1] != [name]:
            yield f"has {name} at another place"
