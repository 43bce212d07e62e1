"""`motet adapter record`, and `motet.client` with prompts: has transformers and PEFT answer a few prompts with an
adapter, and writes down how.

This runs where the adapter was trained, on the model that it was trained on. So it uses none of Motet's own code for
models and adapters: what a runner computes is compared with it.
"""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from motet.digest import ADAPTER_FILES, RECORD_FILE
from motet.errors import SetupError
from motet_runner.adapters.chat_template import JINJA, own_template
from motet_runner.adapters.recorded_answers import (
    MAX_ANSWER_TOKENS,
    MAX_ANSWERS,
    MAX_PROMPT_CHARS,
    MAX_PROMPT_TOKENS,
    MAX_WORD_CHARS,
    RecordedAnswer,
    RecordedAnswers,
)

USUAL_PROMPTS = (
    "Who are you, and what can you do?",
    "Explain in two sentences why the sky is blue.",
    "Write a short letter to a friend about a walk in the rain.",
    "Name three animals and say what each of them eats.",
    "What would you tell somebody who visits your town for the first time?",
    "Continue: The door was open, and nobody had heard the storm.",
    "List the steps of making tea.",
    "Is it better to be early or late? Say why.",
)
USUAL_TOKENS = 64
"""The tokens of an answer. One that comes to its end before is shorter."""


@dataclass(frozen=True, slots=True)
class Recording:
    folder: Path
    model: Path
    prompts: Sequence[str] = USUAL_PROMPTS
    tokens: int = USUAL_TOKENS
    dtype: str = "float32"
    """Of the base model, unless it is quantized"""


def record(order: Recording) -> RecordedAnswers:
    """Write the file into the adapter's folder. Raises SetupError, which says what to change."""
    found = answers_of_peft(order)
    _write(order.folder / RECORD_FILE, found.encode())
    return found


def answers_of_peft(order: Recording) -> RecordedAnswers:
    """Raises SetupError."""
    prompts = _checked(order.prompts)
    try:
        import peft
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise SetupError(
            f"without {error.name} nothing can be recorded. Install it with: pip install peft 'motet[runner]'"
        ) from error
    from motet_runner.base_tokenizer import read_tokenizer
    from motet_runner.execute.load.device import device_named

    transformers.utils.logging.disable_progress_bar()
    with _explained(f"use {order.folder} on {order.model}"):
        tokenizer = read_tokenizer(order.model)
        own = own_template(order.folder, order.model)
        questions = _questions(tokenizer, own.text if own is not None else tokenizer.chat_template, prompts)
        config = transformers.AutoConfig.from_pretrained(order.model)
        of_text = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        kinds = transformers.AutoModelForCausalLM if of_text else transformers.AutoModelForImageTextToText
        base = kinds.from_pretrained(order.model, dtype=getattr(torch, order.dtype))
        if getattr(base.config, "quantization_config", None) is None:
            base = base.to(device_named("auto"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # what one library says of another one helps nobody here
            model = peft.PeftModel.from_pretrained(base, str(order.folder)).eval()
        return _answers(model, questions, order.tokens)


def record_model(
    model: Any, folder: Path, prompts: Sequence[str], tokenizer: Any = None, tokens: int = USUAL_TOKENS
) -> RecordedAnswers:
    """The same with the model of a training, in memory. `folder`: where its active adapter was saved. `tokenizer`: the
    base model's; None: the one that is where the base model came from. Raises SetupError."""
    checked = _checked(prompts)
    with _explained("answer with this model"):
        if tokenizer is None:
            tokenizer = _tokenizer_of(model)
        own = own_template(folder, None)
        questions = _questions(tokenizer, own.text if own is not None else tokenizer.chat_template, checked)
        with _as_served(model):
            found = _answers(model, questions, tokens)
    _write(folder / RECORD_FILE, found.encode())
    return found


def save_template(model: Any, folder: Path, tokenizer: Any) -> None:
    """Write the chat template of a training beside its adapter, unless the base model's own tokenizer has the same or
    cannot be read. Raises SetupError."""
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return
    try:
        base = _tokenizer_of(model)
    except SetupError:
        return
    if base.chat_template != template:
        _write(folder / JINJA, template.encode())


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """A model, a template or an adapter may raise anything."""
    try:
        yield
    except SetupError:
        raise
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).partition("\n")[0]
        raise SetupError(f"transformers and PEFT cannot {what}: {why}") from error


def _tokenizer_of(model: Any) -> Any:
    import transformers

    name = model.peft_config[model.active_adapter].base_model_name_or_path
    try:
        return transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise SetupError(
            f"there is no tokenizer of the base model at {name!r}, so nothing says which tokens prompts are. Give it: "
            "tokenizer=…"
        ) from error


@contextmanager
def _as_served(model: Any) -> Iterator[None]:
    """Without dropout, and without the mixed precision of a training: accelerate has the forward pass of a model
    replaced, and a runner computes in the base model's own type."""
    modes = [(module, module.training) for module in model.modules()]
    replaced = model.__dict__.get("forward")
    try:
        if replaced is not None and "_original_forward" in model.__dict__:
            model.forward = model.__dict__["_original_forward"]
        model.eval()
        yield
    finally:
        if replaced is not None:
            model.forward = replaced
        for module, training in modes:
            module.training = training


class _Questions(NamedTuple):
    special_tokens: bool
    """Whether special tokens come before them"""
    texts: list[str]
    ids: list[list[int]]


def _questions(tokenizer: Any, template: str | None, prompts: Sequence[str]) -> _Questions:
    """The prompts as the chat template has them, if there is one"""
    texts = [_as_chat(tokenizer, template, one) for one in prompts] if template else list(prompts)
    ids = [tokenizer(text, add_special_tokens=not template)["input_ids"] for text in texts]
    _check_lengths(texts, ids)
    return _Questions(not template, texts, ids)


def _answers(model: Any, questions: _Questions, tokens: int) -> RecordedAnswers:
    import peft
    import torch
    import transformers

    base = model.get_base_model()
    quantization = getattr(base.config, "quantization_config", None)
    with torch.inference_mode(), torch.autocast(model.device.type, enabled=False):
        answers = [
            _answer(model, text, prompt, tokens) for text, prompt in zip(questions.texts, questions.ids, strict=True)
        ]
    return RecordedAnswers(
        version=1,
        recorded_by=f"peft {peft.__version__}, transformers {transformers.__version__}"[:MAX_WORD_CHARS],
        dtype=str(base.dtype).removeprefix("torch."),  # type: ignore[arg-type] # else it is refused here
        quantization="" if quantization is None else _name_of(quantization),
        special_tokens=questions.special_tokens,
        answers=answers,
    )


def _check_lengths(texts: Sequence[str], ids: Sequence[Sequence[int]]) -> None:
    for number, (text, tokens) in enumerate(zip(texts, ids, strict=True), 1):
        if len(tokens) > MAX_PROMPT_TOKENS or len(text) > MAX_PROMPT_CHARS or not tokens:
            raise SetupError(
                f"prompt {number} has {len(tokens)} tokens and {len(text)} characters in all. Give it at least one, "
                f"and at most {MAX_PROMPT_TOKENS} tokens and {MAX_PROMPT_CHARS} characters."
            )


def _answer(model: Any, text: str, prompt: list[int], most: int) -> RecordedAnswer:
    answer = _greedy(model, prompt, min(most, MAX_ANSWER_TOKENS), _ends(model))
    logits = model(input_ids=_row(model, [*prompt, *answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.double().log_softmax(-1).gather(1, _row(model, answer).T.to(logits.device))[:, 0]
    if not chosen.isfinite().all():
        raise SetupError(
            f"the model's logits are no finite numbers in {str(logits.dtype).removeprefix('torch.')}. Correct the "
            "adapter's numbers, or use a base model of another dtype."
        )
    logprobs = [min(0.0, float(one)) for one in chosen]
    return RecordedAnswer(prompt=text, prompt_ids=prompt, answer_ids=answer, logprobs=logprobs)


def check_folder(folder: Path) -> None:
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise SetupError(f"{folder} has no {name}. Name the folder that PEFT's save_pretrained() has written.")


def _checked(prompts: Sequence[str]) -> list[str]:
    found = [prompt for prompt in prompts if prompt.strip()]
    if not found or len(found) > MAX_ANSWERS:
        raise SetupError(f"there are {len(found)} prompts. Give at least one, and at most {MAX_ANSWERS}.")
    return found


def _as_chat(tokenizer: Any, template: str, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return str(
        tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    )


def _ends(model: Any) -> set[int]:
    ends = getattr(model.generation_config, "eos_token_id", None)
    return set(ends if isinstance(ends, list) else [ends]) - {None}


def _greedy(model: Any, prompt: list[int], most: int, ends: set[int]) -> list[int]:
    """The most likely token, again and again: no penalty or temperature of the model's generation config."""
    answer: list[int] = []
    given, cache = prompt, None
    while len(answer) < most and not ends.intersection(answer[-1:]):
        output = model(input_ids=_row(model, given), past_key_values=cache, use_cache=True)
        cache, given = output.past_key_values, [int(output.logits[0, -1].argmax())]
        answer += given
    return answer


def _row(model: Any, tokens: list[int]) -> Any:
    import torch

    return torch.tensor([tokens], device=model.device)


def _name_of(quantization: Any) -> str:
    given = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return str(getattr(given.get("quant_method"), "value", given.get("quant_method") or "unknown"))


def _write(path: Path, content: bytes) -> None:
    """Whole, or not at all: the folder may be watched. Raises SetupError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        raise SetupError(f"{path} can't be written: {error.strerror}.") from error
    finally:
        draft.unlink(missing_ok=True)
