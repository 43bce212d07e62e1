"""Tries, at each start, what the plan relies on: it takes a second, and says what this vLLM does otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from motet.domain import pages_for
from motet.errors import ModelFolderError
from motet_runner.external.vllm.driven import AnswersLost, Ask, Driven, Facts, Penalties, Produced
from motet_runner.external.vllm.linears import by_kind
from motet_runner.external.vllm.plain_adapter import write_plain
from motet_runner.external.vllm.reason import lacks_memory
from motet_runner.external.vllm.temporary_folders import temporary_folder

MAX_RANK = 8
"""Of its adapters, unless the engine has a lower one"""
TOKENS = 8
"""Of the tried answers, half of which come after an abort"""
SALT = "motet trial"
FIRST_NUMBER = 1 << 20
"""Of its adapters: those that come later begin at 1."""
MAX_STEPS = 100
LEAST_EFFECT = 1e-3
"""By how much an adapter of large numbers changes the log probability of a token"""
HUGE = 1e6
"""A penalty or reward that no logit outweighs"""
NEAR = 1e-4
"""The most by which the same numbers may differ in another batch. With types of fewer bits than 32, more."""


class Trial:
    def __init__(self, driven: Driven, linears: dict[str, tuple[int, int]], max_rank: int) -> None:
        self._driven = driven
        self._rank = min(MAX_RANK, max_rank)
        self._linears = linears
        self._names = count()
        self._numbers = count(FIRST_NUMBER)
        length = min(3 * driven.facts.block_tokens // 2, driven.facts.max_model_length - TOKENS - 1)
        self._prompt = [1 + (7 * place) % (driven.facts.vocabulary - 1) for place in range(length)]
        self._near = NEAR if driven.facts.dtype == "float32" else 0.2

    def run(self) -> dict[str, tuple[int, int]]:
        """The linears that adapters change. Raises ModelFolderError if something is not as the plan needs it."""
        _check(self._driven.facts)
        self._try_to_count_pages()
        self._try_to_go_on()
        self._try_to_change_logits()
        self._try_another_mask()
        served = self._adapted()
        if served:
            self._try_base_beside(served)
        return {path: self._linears[path] for path in served}

    def _try_to_count_pages(self) -> None:
        """A request has the blocks that the plan counts: when its tokens fill one, with one more, and after its end."""
        block = self._driven.facts.block_tokens
        prompt = self._prompt[:block]
        self._expect_pages(0, block)
        name = self._add(prompt, 3)
        for further in range(2):
            self._next(name)
            self._expect_pages(len(prompt) + further, block)
        self._driven.abort([name])
        self._expect_pages(0, block)

    def _expect_pages(self, tokens: int, block: int) -> None:
        counted, found = pages_for(tokens, block), self._driven.blocks_in_use()
        if found != counted:
            raise ModelFolderError(
                f"This vLLM has {found} of its blocks in use for {tokens} tokens, and Motet counts {counted}, each of "
                f"{block} tokens."
            )

    def _try_to_go_on(self) -> None:
        """An answer that is aborted goes on with the same tokens."""
        whole = self._answer(self._prompt, TOKENS)
        name = self._add(self._prompt, TOKENS)
        half = [self._next(name)[name].token for _ in range(TOKENS // 2)]
        self._driven.abort([name])
        rest = self._answer([*self._prompt, *half], TOKENS - len(half))
        if [*half, *rest] != whole and self._driven.facts.dtype == "float32":
            raise ModelFolderError("This vLLM gives other tokens after a request was aborted and came again.")

    def _try_to_change_logits(self) -> None:
        """A masked request gets what its mask allows, and one whose delivered token is rewarded gets it again."""
        vocabulary = self._driven.facts.vocabulary
        allowed, delivered = vocabulary // 2, vocabulary // 3
        self._add(self._prompt, 1)  # theirs are not the first rows
        masked = self._add(self._prompt, 1, masked=True)
        self._allow(masked, allowed)
        tokens = [*self._prompt, delivered]
        rewarded = self._add(tokens, 1, penalties=Penalties(presence=-HUGE), output_tokens=1)
        found = self._next(masked, rewarded)
        if (found[masked].token, found[rewarded].token) != (allowed, delivered):
            raise ModelFolderError("This vLLM does not draw from the logits that Motet's logits processor leaves.")

    def _try_another_mask(self) -> None:
        """A mask is read for each token, also while no request comes."""
        vocabulary = self._driven.facts.vocabulary
        name, drawn = self._add(self._prompt, 2, masked=True), []
        for allowed in (vocabulary // 2, vocabulary // 3):
            self._allow(name, allowed)
            drawn.append(self._next(name)[name].token == allowed)
        if not all(drawn):
            raise ModelFolderError("This vLLM does not let Motet's logits processor read each mask.")

    def _allow(self, name: str, token: int) -> None:
        self._driven.allow(name, (1 << token).to_bytes((self._driven.facts.vocabulary + 7) // 8, "little"))

    def _adapted(self) -> list[str]:
        """The linears of the kinds for which an adapter has an effect. vLLM drops some kinds silently."""
        served: list[str] = []
        before = self._logprobs(0)
        for paths in by_kind(self._linears).values():
            number = next(self._numbers)
            with self._written(number, paths) as folder:
                try:
                    self._driven.load_adapter(number, folder)
                except Exception as error:  # it raises many things for kinds that it does not adapt
                    if _is_of_no_kind(error):
                        raise
                    continue
            if self._differ(before, self._logprobs(number)) > LEAST_EFFECT:
                served += paths
            self._driven.remove_adapter(number)
        return served

    def _try_base_beside(self, served: list[str]) -> None:
        """Rows of the base model get no adapter of their neighbours."""
        alone = self._logprobs(0)
        number = next(self._numbers)
        with self._written(number, served) as folder:
            self._driven.load_adapter(number, folder)
        base, other = self._add(self._prompt, 1), self._add(self._prompt, 1, adapter=number)
        found = self._next(base, other)
        self._driven.remove_adapter(number)
        if self._differ(alone, _logprobs_of(found[base])) > self._near:
            raise ModelFolderError("This vLLM applies an adapter to requests for the base model beside it.")
        if self._differ(alone, _logprobs_of(found[other])) <= LEAST_EFFECT:
            raise ModelFolderError("This vLLM does not apply an adapter beside requests for the base model.")

    @contextmanager
    def _written(self, number: int, paths: list[str]) -> Iterator[Path]:
        generator = torch.Generator().manual_seed(number)
        halves = {}
        for path in paths:
            inputs, outputs = self._linears[path]
            a = torch.randn(self._rank, inputs, generator=generator, dtype=torch.float32) / inputs**0.5
            halves[path] = a, torch.randn(outputs, self._rank, generator=generator, dtype=torch.float32)
        with temporary_folder() as folder:
            write_plain(halves, self._rank, Path(folder))
            yield Path(folder)

    def _answer(self, tokens: list[int], count: int) -> list[int]:
        name = self._add(tokens, count)
        return [self._next(name)[name].token for _ in range(count)]

    def _logprobs(self, adapter: int) -> dict[int, float]:
        name = self._add(self._prompt, 1, adapter=adapter)
        return _logprobs_of(self._next(name)[name])

    @staticmethod
    def _differ(one: dict[int, float], other: dict[int, float]) -> float:
        """By how much the log probability of the likeliest token of `one` differs, at least"""
        token = max(one, key=one.__getitem__)
        return abs(one[token] - other.get(token, min(other.values())))

    def _add(self, tokens: list[int], count: int, *, adapter: int = 0, **more: Any) -> str:
        name = f"trial {next(self._names)}"
        options = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": 4}
        self._driven.add(Ask(name, tokens, options, adapter, SALT, **more))
        return name

    def _next(self, *names: str) -> dict[str, Produced]:
        """The next token of each of these requests, which alone are there. A prompt may take several iterations."""
        found: dict[str, Produced] = {}
        for _ in range(MAX_STEPS):
            found |= {one.name: one for one in self._driven.step()}
            if found.keys() >= set(names):
                return found
        raise ModelFolderError("This vLLM does not come to the end of a prompt.")


def _check(facts: Facts) -> None:
    """What vLLM itself says of the model"""
    if facts.groups > 1:
        raise ModelFolderError(
            f"{facts.architecture} has layers of {facts.groups} kinds, for example with and without a sliding "
            "window. vLLM gives each kind blocks of its own, which Motet does not count. Use a pool whose "
            "engine.backend is motet, or another model."
        )
    if facts.blocks < 1:
        raise ModelFolderError(
            f"The memory for KV holds no block of {facts.block_tokens} tokens. Raise engine.kvCacheMiB."
        )
    if not facts.shares_prefixes:
        raise ModelFolderError(
            f"This vLLM has no prefix cache for {facts.architecture}, so each row that comes again would be "
            "computed from its beginning. Use a pool whose engine.backend is motet, or another model."
        )


def _is_of_no_kind(error: Exception) -> bool:
    """It says nothing of the linears of an adapter."""
    return isinstance(error, AnswersLost | OSError | SafetensorError) or lacks_memory(error)


def _logprobs_of(produced: Produced) -> dict[int, float]:
    assert produced.logprobs is not None
    return dict(produced.logprobs.top)
