"""What vLLM says is one line for the owner of a pool."""

import pytest

from motet.errors import ModelFolderError
from motet_runner.external.vllm.reason import advice_of, reason_of

TOO_SMALL = (
    "To serve at least one request with the model's max seq len (4096), more is needed. Try increasing "
    "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine. See https://docs.vllm.ai/x "
    "for more"
)
TOO_LONG = """\
1 validation error for ModelConfig
  Value error, User-specified max_model_len (100000) is greater than 4096. To allow overriding this maximum, set the \
env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1. [type=value_error, input_value=ArgsKwargs()]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""


def test_vllms_words_become_the_fields_of_the_pool() -> None:
    said = reason_of(ValueError(TOO_SMALL))
    assert "increasing engine.kvCacheMiB or engine.memoryUtilizationPercent or decreasing engine.maxModelLength" in said
    assert said.endswith("when initializing the engine.")


def test_words_of_a_command_line_become_fields_too() -> None:
    text = "Less than requested. Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory."
    assert reason_of(ValueError(text)).endswith(" Decrease engine.kvCacheMiB, or reduce CPU memory.")


def test_words_for_several_gpus_become_fields_too() -> None:
    text = "Total number of attention heads (4) must be divisible by tensor parallel size (3)."
    assert reason_of(ValueError(text)).endswith("must be divisible by engine.parallel.tensor (3).")


def test_of_what_pydantic_refuses_the_sentence_stays() -> None:
    assert reason_of(ValueError(TOO_LONG)) == "User-specified engine.maxModelLength (100000) is greater than 4096."


def test_an_error_without_words_has_its_name() -> None:
    assert reason_of(RuntimeError()) == "RuntimeError"
    assert reason_of(RuntimeError("no attention\nfor this\n")) == "no attention"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ValueError(TOO_SMALL), ""),
        (ModelFolderError("engine.parallel has 64 workers"), ""),
        (RuntimeError("CUDA out of memory. Tried to allocate 9 GiB."), " Lower engine.maxResidentAdapters, "),
        (MemoryError(), " Lower engine.maxResidentAdapters, "),
        (OSError(28, "No space left on device"), " The folder for temporary files (TMPDIR) is full."),
        (ValueError("no attention for this"), " Change model.uri, or set engine.backend to motet."),
    ],
)
def test_the_owner_of_a_pool_learns_what_to_change(error: Exception, advice: str) -> None:
    assert advice_of(error, quantised=False).startswith(advice)
    assert bool(advice_of(error, quantised=False)) == bool(advice)


def test_motets_engine_is_no_way_out_for_a_quantised_model() -> None:
    assert advice_of(KeyError("lora_a"), quantised=True) == " Change model.uri."
