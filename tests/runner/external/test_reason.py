"""What vLLM says is one line for the owner of a pool."""

import tempfile

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


# As vLLM 0.32 says it
LITTLE_FREE = (
    "Free memory on device cuda:0 (20.0/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 "
    "GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
OLD_GPU = (
    "Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has compute "
    "capability 7.5. You can use float16 instead by explicitly setting the `dtype` flag in CLI, for example: "
    "--dtype=half."
)
OTHER_BACKEND = (
    "Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: ['head_size not "
    "supported']"
)
OF_A_WORKER = (
    "WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."
)
GPU_FULL = RuntimeError("CUDA out of memory. Tried to allocate 9 GiB.")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LITTLE_FREE, "Decrease engine.memoryUtilizationPercent or reduce GPU memory"),
        (OLD_GPU, "by explicitly setting the engine.dtype"),
        (OTHER_BACKEND, "engine.vllm.attentionBackend AttentionBackendEnum.FLASHINFER is not valid"),
    ],
)
def test_what_vllm_says_on_a_gpu_names_fields(text: str, said: str) -> None:
    assert said in reason_of(ValueError(text))
    assert advise(ValueError(text)) == ""


def test_of_a_worker_that_fails_its_own_words_stay() -> None:
    failed = "Worker failed with error 'no attention\nfor this', please check the stack trace above for the root cause"
    assert reason_of(RuntimeError(failed)) == "no attention"


def advise(error: Exception, *, quantised: bool = False, kv_by_share: bool = False) -> str:
    return advice_of(error, quantised=quantised, kv_by_share=kv_by_share)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ValueError(TOO_SMALL), ""),
        (ModelFolderError("engine.parallel has 64 workers"), ""),
        (GPU_FULL, " Lower engine.maxResidentAdapters, "),
        (MemoryError(), " Lower engine.maxResidentAdapters, "),
        (OSError(12, "Cannot allocate memory"), " Lower engine.maxResidentAdapters, "),
        (
            OSError(28, "No space left on device", f"{tempfile.gettempdir()}/motet-vllm-1/a"),
            " The folder for temporary files (TMPDIR) is full.",
        ),
        (OSError(28, "No space left on device", "/var/lib/vllm/x"), " A disk or /dev/shm is full."),
        (
            RuntimeError("unable to write to file </torch_123_1>: No space left on device (28)"),
            " A disk or /dev/shm is full.",
        ),
        (Exception(OF_A_WORKER), " The log above has the cause."),
        (ValueError("no attention for this"), " Change model.uri, or set engine.backend to motet."),
        (
            ImportError("cannot import name 'x' from 'vllm.v1.engine.core' (/x)"),
            " Change model.uri, or set engine.backend to motet.",
        ),
    ],
)
def test_the_owner_of_a_pool_learns_what_to_change(error: Exception, advice: str) -> None:
    assert advise(error).startswith(advice)
    assert bool(advise(error)) == bool(advice)


def test_memory_of_a_gpu_is_lowered_by_the_field_that_sets_it() -> None:
    assert advise(GPU_FULL).endswith(" or engine.kvCacheMiB.")
    assert advise(GPU_FULL, kv_by_share=True).endswith(" or engine.memoryUtilizationPercent.")
    assert advise(MemoryError(), kv_by_share=True).endswith(" or engine.kvCacheMiB.")


def test_motets_engine_is_no_way_out_for_a_quantised_model() -> None:
    assert advise(KeyError("lora_a"), quantised=True) == " Change model.uri."
