"""What Motet uses of vLLM by name, and versions that lack some of it."""

import ast
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from motet_runner.external.vllm import names
from motet_runner.external.vllm.names import BY_PLACE, ENGINE_ARGUMENTS, SAMPLING_OPTIONS, USED, differing
from motet_runner.external.vllm.options import options_of
from motet_runner.interface import Sampling
from tests.runner.external.vllm_itself import ENVIRONMENT, needs_vllm
from tools.surface import compared

SURFACE, PROCESSOR_V1, PROCESSOR_V2 = (
    ast.parse(Path(names.__file__).with_name(name).read_text())
    for name in ("surface.py", "processor_v1.py", "processor_v2.py")
)


def source(members: Mapping[str, tuple[str, ...]]) -> str:
    lines = [
        f"def {name}(self, {listed(given)}): ..." if given else f"{name}: object" for name, given in members.items()
    ]
    return "\n    ".join(lines)


def listed(given: tuple[str, ...]) -> str:
    return ", ".join(one for one in given if one != BY_PLACE)


def package(**changes: str) -> dict[str, str]:
    """The files of a vLLM that has just what is used. `changes`: of a text in them"""
    files = {}
    for file, classes in USED.items():
        parts = [
            f"class {owner}:\n    {source(members)}\n" if owner else f"{source(members)}\n".replace("self, ", "")
            for owner, members in classes.items()
        ]
        files[file] = "\n".join(parts)
    for old, new in changes.items():
        assert any(old in text for text in files.values()), old
        files = {file: text.replace(old, new) for file, text in files.items()}
    return files


def calls(name: str) -> set[str]:
    found = [one for one in ast.walk(SURFACE) if isinstance(one, ast.Call) and ast.unparse(one.func).endswith(name)]
    assert found
    return {keyword.arg for one in found for keyword in one.keywords if keyword.arg}


def test_the_lists_have_what_the_surface_gives() -> None:
    assert calls("EngineArgs") == set(ENGINE_ARGUMENTS)
    assert calls("tokens_input") <= set(USED["inputs/engine.py"][""]["tokens_input"])
    assert calls("add_request") <= set(USED["v1/engine/llm_engine.py"]["LLMEngine"]["add_request"])
    everything = Sampling(max_tokens=9, temperature=1.0, logit_bias=((1, 2.0),), logprobs=True, top_logprobs=2)
    given = options_of(everything, seed=1, output_tokens=0, eos_token_ids=frozenset(), vocabulary=9)
    assert given.keys() | calls("SamplingParams") == set(SAMPLING_OPTIONS)


def test_the_lists_have_each_file_that_the_surface_imports() -> None:
    modules = {one.module for one in ast.walk(SURFACE) if isinstance(one, ast.ImportFrom) and one.module}
    imported = {one.removeprefix("vllm.").replace(".", "/") + ".py" for one in modules if one.startswith("vllm.")}
    assert imported - {"platforms.py", "version.py"} <= USED.keys()


def test_the_lists_have_what_is_given_by_place() -> None:
    """A call of a function that vLLM has, and a method that vLLM calls"""
    functions = {
        name: given
        for classes in USED.values()
        for owner, members in classes.items()
        for name, given in members.items()
        if given and owner != "LogitsProcessor"
    }
    called = set()
    for module in (SURFACE, PROCESSOR_V1):
        for call in [one for one in ast.walk(module) if isinstance(one, ast.Call)]:
            name = ast.unparse(call.func).rpartition(".")[2]
            if name in functions:
                called.add(name)
                assert len(call.args) == by_place(functions[name]), name
    assert called == functions.keys()
    for module, file in (
        (PROCESSOR_V1, "v1/sample/logits_processor/interface.py"),
        (PROCESSOR_V2, "v1/worker/gpu/sample/logits_processor/interface.py"),
    ):
        methods = {one.name: one for one in ast.walk(module) if isinstance(one, ast.FunctionDef)}
        for name, given in USED[file]["LogitsProcessor"].items():
            assert len(methods[name].args.args) - 1 == by_place(given), name


def by_place(given: tuple[str, ...]) -> int:
    return given.index(BY_PLACE) if BY_PLACE in given else 0


@needs_vllm
@pytest.mark.soak
def test_the_installed_version_has_all_of_them() -> None:
    (folder,) = ENVIRONMENT.glob("lib/python*/site-packages/vllm")
    assert differing(lambda file: (folder / file).read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("step: object", "advance: object", "v1/engine/llm_engine.py has no LLMEngine.step"),
        ("lora_id", "lora", "LLMEngine.remove_lora has no parameter lora_id"),
        ("disable_log_stats)", "disable_log_stats, plan)", "LLMEngine.from_vllm_config needs plan"),
        ("disable_log_stats)", "disable_log_stats, *, plan)", "LLMEngine.from_vllm_config needs plan"),
        ("disable_log_stats)", "disable_log_stats, plan=None, *, other=1)", None),
        ("request_id, prompt,", "prompt, request_id,", "LLMEngine.add_request has request_id at another place"),
        (
            "self, request_ids",
            "self, internal=False, request_ids=()",
            "LLMEngine.abort_request has request_ids at another",
        ),
        ("(prompt_token_ids, cache_salt)", "(*, prompt_token_ids, cache_salt)", "tokens_input has prompt_token_ids at"),
        (
            "prompt, params, lora_request)",
            "prompt, params, lora_request, /)",
            "LLMEngine.add_request has lora_request by its",
        ),
        ("lora_id)", "lora_id, /)", None),
        ("params, lora_request", "params, arrival=None, lora_request=None", None),
        ("(self, logits)", "(self, batch=None, logits=None)", "LogitsProcessor.apply has logits at another place"),
        ("apply_staged_writes", "flush", "v1/worker/gpu/sample/logits_processor/interface.py has no LogitsProcessor"),
        ("enforce_eager", "eager", "engine/arg_utils.py has no EngineArgs.enforce_eager"),
        ("class CacheConfig", "class Cache", "config/cache.py has no CacheConfig"),
        ("tokens_input", "tokens", "inputs/engine.py has no tokens_input"),
    ],
)
def test_a_name_that_is_gone_or_wants_more_is_found(old: str, new: str, said: str | None) -> None:
    found = differing(package(**{old: new}).get)
    assert any(one.startswith(said) for one in found) if said else found == []


def test_what_a_constructor_sets_counts() -> None:
    body = "self.request_id, self.num_preemptions = '', 0"
    files = package() | {"v1/request.py": f"class Request:\n    def __init__(self):\n        {body}\n"}
    assert differing(files.get) == []


def test_a_file_for_a_newer_python_is_named() -> None:
    files = package() | {"outputs.py": "class RequestOutput(:"}
    assert differing(files.get) == ["outputs.py is for a newer Python than this one"]


def test_a_file_that_is_gone_is_found() -> None:
    files = package()
    del files["outputs.py"]
    assert differing(files.get) == ["there is no outputs.py"]


def test_a_package_is_read_as_it_comes(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in package(lora_path="path").items():
            archive.writestr(f"vllm/{file}", text)
    assert compared(wheel) == ["lora/request.py has no LoRARequest.lora_path"]
