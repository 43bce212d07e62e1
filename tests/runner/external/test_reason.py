"""What vLLM says is one line for the owner of a pool."""

from motet_runner.external.vllm.reason import reason_of

TOO_SMALL = (
    "To serve at least one request with the model's max seq len (4096), more is needed. Try increasing "
    "`gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine. See https://docs.vllm.ai/x "
    "for more"
)
TOO_LONG = """\
1 validation error for ModelConfig
  Value error, User-specified max_model_len (100000) is greater than 4096. [type=value_error, input_value=ArgsKwargs()]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""


def test_vllms_words_become_the_fields_of_the_pool() -> None:
    said = reason_of(ValueError(TOO_SMALL))
    assert "increasing engine.kvCacheMiB or engine.memoryUtilizationPercent or decreasing engine.maxModelLength" in said
    assert said.endswith("when initializing the engine.")


def test_words_for_several_gpus_become_fields_too() -> None:
    text = "Total number of attention heads (4) must be divisible by tensor parallel size (3)."
    assert reason_of(ValueError(text)).endswith("must be divisible by engine.parallel.tensor (3).")


def test_of_what_pydantic_refuses_the_sentence_stays() -> None:
    assert reason_of(ValueError(TOO_LONG)) == "User-specified engine.maxModelLength (100000) is greater than 4096."


def test_an_error_without_words_has_its_name() -> None:
    assert reason_of(RuntimeError()) == "RuntimeError"
    assert reason_of(RuntimeError("no attention\nfor this\n")) == "no attention"
