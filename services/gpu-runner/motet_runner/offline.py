"""The engine as a library: prompts and folders of adapters in, texts out, in one process and without servers.

    from motet_runner.offline import OfflineEngine

    engine = OfflineEngine("models/base", adapters={"pirate": "adapters/pirate"})
    for answer in engine.generate(["Who are you?", "Where is the ship?"], adapter="pirate", max_tokens=64):
        print(answer.text)

As many requests as fit into memory run together, each with its own adapter. The other requests wait in order.
"""

import logging
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

import structlog
from tqdm import tqdm

from motet.adapter_template import AdapterTemplate
from motet.domain import BASE, Digest, RequestId, pages_for
from motet.errors import Declined, InvalidRequest, MotetError
from motet.grammars.grammar import Grammar
from motet.prefix_hints import prefix_salt
from motet_runner.adapters.certification import EngineLimits, certify
from motet_runner.adapters.layout import AdapterLayout
from motet_runner.adapters.proof import ProofOrder
from motet_runner.base_tokenizer import tokenizer_of
from motet_runner.engine import Engine
from motet_runner.interface import EngineConfig, EngineInfo, Finish, Logprobs, NewSequence, Sampling
from motet_runner.settings import KERNEL_CACHE

__all__ = ["Answer", "Message", "OfflineEngine", "Prompt", "Request", "Sampling"]

log = structlog.get_logger(__name__)

Message = Mapping[str, str]
"""A message of a chat: `role` and `content`"""

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, its tokens, or the messages of a chat: the template of the adapter or the model makes a text of them"""

Folder = str | PathLike[str]

USUAL = Sampling(max_tokens=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    prompt: Prompt
    adapter: str = ""
    """The name of one of the engine's adapters. Empty: the base model alone."""
    sampling: Sampling = USUAL
    seed: int = 0
    """With a temperature, the same seed draws the same tokens."""
    choices: int = 1
    """The number of answers. They share the memory of the prompt."""
    grammar: Grammar | None = None
    """That the answer has to follow"""


@dataclass(slots=True, kw_only=True)
class Answer:
    """One choice of one request."""

    number: int
    """The index of the request among the given requests, from 0"""
    choice: int
    prompt_tokens: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Including the token that ended the answer"""
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    """The log probabilities of the prompt's tokens from the second on, if `Sampling.prompt_logprobs` asks for them"""
    finish: Finish | None = None
    error: MotetError | None = None
    """Why the answer is not complete"""

    def fail(self, error: MotetError) -> None:
        self.finish, self.error = Finish.FAILED, error


class OfflineEngine:
    def __init__(self, model: Folder, *, adapters: Mapping[str, Folder] | None = None, **options: Any) -> None:
        """`adapters`: name in requests → folder, as PEFT saves it. `options` are the fields of
        `motet_runner.interface.EngineConfig`, such as `kv_cache_mib`, `threads` or `dtype`.

        Raises an error that says what to change if the model or an adapter cannot be used. Warnings go to stderr,
        unless the program has configured structlog itself.
        """
        if not structlog.is_configured():
            structlog.configure(
                logger_factory=structlog.PrintLoggerFactory(sys.stderr),
                wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            )
        usual = {"model": Path(model), "kernel_cache": KERNEL_CACHE.expanduser()}
        self.engine = Engine(EngineConfig(**(usual | options)))
        self._await_kernels()
        self.tokenizer = tokenizer_of(Path(model))
        self._model = Path(model)
        self._adapters: dict[str, Digest] = {}
        self._templates: dict[str, AdapterTemplate] = {}
        """Of adapters that have one"""
        self._names = count()
        self._live: dict[RequestId, _Live] = {}
        for name, folder in (adapters or {}).items():
            self.add_adapter(name, folder)

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def add_adapter(self, name: str, folder: Folder) -> None:
        """Check an adapter's files and weights. Requests may use it from now on."""
        limits = EngineLimits.of_engine(self.info).with_base(self._model, Digest(""), self.info.vocabulary)
        found = certify(Path(folder), limits)
        self.add_certified(name, found.layout)
        if found.template:
            self._templates[name] = AdapterTemplate.decode(found.template)

    def add_certified(self, name: str, layout: AdapterLayout, proof: ProofOrder | None = None) -> None:
        """Add an adapter that `certify` has checked. `proof`: the engine is to prove it, and says so in its events."""
        if not name or name in self._adapters:
            raise InvalidRequest(f"An adapter's name is empty or taken: {name!r}. Choose another one.", param="name")
        digest = Digest(name)
        self.engine.load_adapter(digest, layout, proof=proof)
        self._adapters[name] = digest

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        adapter: str | Sequence[str] = "",
        seed: int = 0,
        grammar: Grammar | None = None,
        progress: bool | None = None,
        **sampling: Any,
    ) -> list[Answer]:
        """Answers in the order of the prompts. `adapter`: one name for all prompts, or one name for each prompt.
        `sampling`: fields of `motet_runner.interface.Sampling`, such as `max_tokens` or `temperature`.

        An answer that is not complete has an `error`, and the log counts such answers. `progress` shows a bar; None: if
        stderr is a terminal.
        """
        adapters = [adapter] * len(prompts) if isinstance(adapter, str) else list(adapter)
        if len(adapters) != len(prompts):
            raise InvalidRequest(f"There are {len(prompts)} prompts and {len(adapters)} adapters.", param="adapter")
        for unknown in {*adapters} - {"", *self._adapters}:
            raise self._unknown(unknown)
        usual = Sampling(**{"max_tokens": USUAL.max_tokens, **sampling})
        requests = [
            Request(prompt=prompt, adapter=name, sampling=usual, seed=seed, grammar=grammar)
            for prompt, name in zip(prompts, adapters, strict=True)
        ]
        return sorted(self.run(requests, progress=progress), key=lambda answer: answer.number)

    def run(self, requests: Iterable[Request], *, progress: bool | None = None) -> Generator[Answer]:
        """Answers in the order in which they end. A request is taken when there is room for it, so `requests` may be
        a generator that reads a large file. Several runs may be open at once: they share the engine."""
        total = sum(one.choices for one in requests) if isinstance(requests, Sequence) else None
        shown = sys.stderr.isatty() if progress is None else progress
        answers, failures = 0, []
        with closing(_Run(self.engine, self._live, self._choices(requests)).answers()) as ending:
            for answer in tqdm(ending, total=total, unit=" answers", disable=not shown):
                if self.tokenizer is not None:
                    answer.text = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
                answers += 1
                if answer.error is not None:
                    failures.append(answer.error)
                yield answer
        if failures:
            log.warning("answers_failed", failed=len(failures), answers=answers, first=str(failures[0]))

    def _await_kernels(self) -> None:
        """Waits for the compiler, because an offline batch is not urgent."""
        while (seconds := self.engine.idle()) is not None:
            time.sleep(seconds)
        kernels = self.engine.report().kernels
        if kernels is not None and kernels.note:
            log.warning("kernels", serving=kernels.serving, note=kernels.note)

    def _choices(self, requests: Iterable[Request]) -> Iterator["_Choice"]:
        for number, request in enumerate(requests):
            parent: RequestId | None = None
            for choice in range(request.choices):
                answer = Answer(number=number, choice=choice)
                name = RequestId(str(next(self._names)))
                sequence = None
                try:
                    sequence = self._sequence(request, name, choice, parent)
                    answer.prompt_tokens = len(sequence.prompt)
                except MotetError as error:
                    answer.fail(error)
                parent = parent or name
                yield _Choice(answer, sequence)

    def _sequence(self, request: Request, name: RequestId, choice: int, parent: RequestId | None) -> NewSequence:
        if request.adapter and request.adapter not in self._adapters:
            raise self._unknown(request.adapter)
        sampling = request.sampling.checked(self.info.vocabulary)
        try:
            prompt = self._tokens(request.prompt, self._templates.get(request.adapter))
        except MotetError:
            raise
        except Exception as error:  # a template may raise anything
            what = (
                "chat template rejects these messages" if _is_chat(request.prompt) else "tokenizer rejects this prompt"
            )
            raise InvalidRequest(f"The model's {what}: {str(error) or type(error).__name__}", param="prompt") from None
        adapter = self._adapters.get(request.adapter, BASE)
        return NewSequence(
            request=name,
            epoch=1,
            choice=choice,
            prompt=prompt,
            adapter=adapter,
            promise=pages_for(len(prompt) + sampling.max_tokens, self.info.page_tokens),
            sampling=sampling,
            seed=request.seed,
            parent=parent,
            prefix_salt=prefix_salt(BASE, adapter, ""),
            grammar=request.grammar,
        )

    def _tokens(self, prompt: Prompt, own: AdapterTemplate | None) -> tuple[int, ...]:
        of_chat = _is_chat(prompt)
        if not isinstance(prompt, str) and not of_chat:
            return tuple(map(int, prompt))  # type: ignore[arg-type] # these are tokens
        if self.tokenizer is None:
            raise InvalidRequest("The model's folder has no tokenizer. Give prompts as tokens.", param="prompt")
        if not of_chat:
            return tuple(self.tokenizer(prompt)["input_ids"])
        by = {} if own is None else {"chat_template": own.text} | {k: v for k, v in own.special_tokens.items() if v}
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **by)
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _unknown(self, adapter: str) -> InvalidRequest:
        known = ", ".join(sorted(self._adapters)) or "none"
        return InvalidRequest(f"There is no adapter {adapter!r}. Known adapters: {known}.", param="adapter")


@dataclass(frozen=True, slots=True)
class _Choice:
    answer: Answer
    sequence: NewSequence | None
    """None: the answer has already failed."""


@dataclass(frozen=True, slots=True)
class _Live:
    """An answer that the engine computes, and the queue of its run for ended answers."""

    answer: Answer
    ended: deque[Answer]


class _Run:
    """Keeps the engine full until the run's last answer has ended. A step also gives tokens to other runs, because a
    program may take answers of several runs in turns."""

    def __init__(self, engine: Engine, live: dict[RequestId, _Live], coming: Iterator[_Choice]) -> None:
        """`live` has the answers of all runs of this engine."""
        self._engine = engine
        self._live = live
        self._coming = coming
        self._next = next(coming, None)
        self._ended: deque[Answer] = deque()

    def answers(self) -> Generator[Answer]:
        try:
            while self._next is not None or self._own or self._ended:
                self._fill()
                if not self._ended:
                    self._step()
                while self._ended:
                    yield self._ended.popleft()
        finally:  # also if the caller stops early
            for request in self._own:
                self._engine.cancel(request)
                del self._live[request]

    @property
    def _own(self) -> list[RequestId]:
        return [request for request, live in self._live.items() if live.ended is self._ended]

    def _fill(self) -> None:
        """Give the engine requests that fit; end those that can never be computed."""
        most = self._engine.info.max_sequences
        while self._next is not None and not self._ended and len(self._live) < most:
            sequence, answer = self._next.sequence, self._next.answer
            if sequence is not None:
                try:
                    self._engine.add(sequence)
                    self._live[sequence.request] = _Live(answer, self._ended)
                except Declined as error:
                    if self._live:  # a live request will free pages
                        return
                    answer.fail(error)
                except MotetError as error:
                    answer.fail(error)
            if answer.error is not None:
                self._ended.append(answer)
            self._next = next(self._coming, None)

    def _step(self) -> None:
        for output in self._engine.step().sequences:
            live = self._live.get(output.request)
            if live is None:
                continue  # its run was closed
            answer = live.answer
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            if output.finish is not None:
                answer.finish, answer.error = output.finish, output.error
                live.ended.append(self._live.pop(output.request).answer)


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
