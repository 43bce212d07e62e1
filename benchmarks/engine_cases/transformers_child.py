"""transformers' `generate`, with PEFT's adapters where requests have one, in a process of its own.

It is a process of its own because OpenMP is set up once in a process: our engine begins as the product starts it, with
threads that soon sleep while they wait. These threads spin, which is faster on cores that nobody else needs.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from motet_runner.thread_environment import THREAD_ENVIRONMENT

REFERENCE = "float32"


@dataclass(frozen=True, slots=True)
class How:
    """How `generate` runs."""

    dtype: str
    threads: int

    def __str__(self) -> str:
        return f"{self.dtype}, {self.threads} threads"


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are computed together: each gets as many tokens as the longest answer has."""

    prompts: Sequence[tuple[int, ...]]
    output: int
    adapters: Sequence[int] | None = None
    """The adapter of each request; None: PEFT is not there."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Two tokens that could follow."""

    before: tuple[int, ...]
    either: tuple[int, int]
    adapter: int | None


class TransformersChild:
    """The other process, as this one sees it."""

    def __init__(self, connection: Connection, process: psutil.Process) -> None:
        self._connection = connection
        self.process = process

    def generate(self, how: How, batch: Batch) -> tuple[float, list[list[int]]]:
        """The seconds, and the tokens of each answer."""
        return self._ask(("generate", how, batch))  # type: ignore[no-any-return]

    def distance(self, choice: Choice) -> float:
        """How far the logits of both tokens lie apart in float32, as a share of the largest one."""
        return self._ask(("distance", choice))  # type: ignore[no-any-return]

    def _ask(self, what: tuple[Any, ...]) -> Any:
        self._connection.send(what)
        return self._connection.recv()


@contextmanager
def transformers_child(model: Path, adapters: Sequence[Path]) -> Iterator[TransformersChild]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(theirs, model, adapters), daemon=True)
    ours_only = {name: os.environ.pop(name) for name in THREAD_ENVIRONMENT if name in os.environ}
    try:
        process.start()
    finally:
        os.environ |= ours_only
    # With this end open here, the other process's end would go unnoticed.
    theirs.close()
    try:
        yield TransformersChild(ours, psutil.Process(process.pid))
    finally:
        ours.close()
        process.join()


# ---------------------------------------------------------------------------------------------------- the other process


def _answer(connection: Connection, model: Path, adapters: Sequence[Path]) -> None:
    models = _Models(model, adapters)
    with torch.inference_mode():
        while True:
            try:
                what, *arguments = connection.recv()
            except EOFError:
                return
            connection.send(getattr(models, what)(*arguments))


class _Models:
    """Each is loaded when it is first needed."""

    def __init__(self, folder: Path, adapters: Sequence[Path]) -> None:
        self._folder = folder
        self._adapters = adapters
        self._loaded: dict[tuple[str, bool], Any] = {}
        # PEFT refuses a batch of several adapters if one of them has DoRA.
        self._in_turn = any(json.loads((one / "adapter_config.json").read_text()).get("use_dora") for one in adapters)

    def generate(self, how: How, batch: Batch) -> tuple[float, list[list[int]]]:
        torch.set_num_threads(how.threads)
        model = self._model(how.dtype, with_adapters=batch.adapters is not None)
        began = time.perf_counter()
        if batch.adapters is None or not self._in_turn:
            answers = self._generate(model, batch)
        else:
            answers = []
            for prompt, adapter in zip(batch.prompts, batch.adapters, strict=True):
                model.set_adapter(str(adapter))
                answers += self._generate(model, Batch([prompt], batch.output))
        return time.perf_counter() - began, answers

    def _generate(self, model: Any, batch: Batch) -> list[list[int]]:
        longest = max(len(prompt) for prompt in batch.prompts)
        more = {} if batch.adapters is None else {"adapter_names": [str(one) for one in batch.adapters]}
        padded = [(0,) * (longest - len(prompt)) + prompt for prompt in batch.prompts]
        mask = [(0,) * (longest - len(prompt)) + (1,) * len(prompt) for prompt in batch.prompts]
        answers = model.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=batch.output,
            do_sample=False,
            **more,
        )
        return answers[:, longest:].tolist()  # type: ignore[no-any-return]

    def distance(self, choice: Choice) -> float:
        model = self._model(REFERENCE, with_adapters=choice.adapter is not None)
        more = {}
        if choice.adapter is not None and self._in_turn:
            model.set_adapter(str(choice.adapter))
        elif choice.adapter is not None:
            more = {"adapter_names": [str(choice.adapter)]}
        logits = model(input_ids=torch.tensor([choice.before]), **more).logits[0, -1]
        one, other = choice.either
        return float((logits[one] - logits[other]).abs() / logits.abs().max())

    def _model(self, dtype: str, *, with_adapters: bool) -> Any:
        if (dtype, with_adapters) not in self._loaded:
            self._loaded[dtype, with_adapters] = self._load(getattr(torch, dtype), with_adapters=with_adapters)
        return self._loaded[dtype, with_adapters]

    def _load(self, dtype: torch.dtype, *, with_adapters: bool) -> Any:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype)
        # Every answer has its full length.
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        if with_adapters:
            for number, folder in enumerate(self._adapters):
                # Adapters would be float32 otherwise, which is slower.
                name, adapter = str(number), str(folder)
                if number == 0:
                    model = PeftModel.from_pretrained(model, adapter, name, autocast_adapter_dtype=False)
                else:
                    model.load_adapter(adapter, name, autocast_adapter_dtype=False)
            model = model.to(dtype)
        return model.eval()
