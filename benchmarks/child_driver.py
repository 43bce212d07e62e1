"""Runs the engine of a pool with `engine.backend: vllm`, as a library, for `benchmarks.external`, with the Python of
vLLM's environment.

It understands the questions of `benchmarks.vllm_driver`, where an adapter may wait for one of "slots", and:

    {"do": "beside_loads", "prompts", "adapters", "output", "at_once", "neighbours"}
        -> {"failed", "loads", "reads": in iterations of vLLM, "gaps": [seconds between two tokens of a neighbour]}
    {"do": "under_pressure", "prompts", "output", "promises": [tokens], "overcommit"}
        -> {"tokens", "parked", "preempted": by vLLM}
"""

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.random_llama import with_tokenizer
from benchmarks.vllm_driver import serve
from motet.domain import BASE, Digest, RequestId, pages_for
from motet.errors import Declined
from motet.grammars.grammar import Grammar, GrammarForm
from motet_runner.adapters.certification import certify
from motet_runner.external.vllm.__main__ import load
from motet_runner.interface import AdapterLoaded, EngineConfig, NewSequence, ParkedNow, Sampling, SequenceOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["lighthouse", "harbour", "market"]},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1000},
    },
    "required": ["kind", "notes"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(GrammarForm.JSON_SCHEMA, json.dumps(SCHEMA))
"""Of a row with a mask. No answer here is long enough to follow it to its end."""


class Counted:
    """What vLLM does that the plan must not let it do."""

    def __init__(self) -> None:
        self.preempted = self.reads = 0
        self._in_iteration = False

    def watch(self) -> None:
        from vllm.lora.lora_model import LoRAModel
        from vllm.v1.core.sched.scheduler import Scheduler

        from motet_runner.external.vllm.surface import Surface

        self._wrap(Surface, "step", self._begin, self._end)
        self._wrap(Scheduler, "_preempt_request", self._preempt)
        # An adapter is read by a library that Python does not see, and its settings by Python.
        LoRAModel.from_local_checkpoint = self._reading(LoRAModel.from_local_checkpoint)
        sys.addaudithook(self._on_event)

    def _wrap(self, kind: Any, name: str, before: Callable[[], object], after: Callable[[], object] = int) -> None:
        inner = getattr(kind, name)

        def wrapped(*given: Any, **named: Any) -> Any:
            before()
            try:
                return inner(*given, **named)
            finally:
                after()

        setattr(kind, name, wrapped)

    def _reading(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            self.reads += self._in_iteration
            return inner(*given, **named)

        return wrapped

    def _on_event(self, event: str, given: tuple[Any, ...]) -> None:
        # Other threads write adapters meanwhile.
        here = threading.current_thread() is threading.main_thread()
        self.reads += here and self._in_iteration and event == "open" and "adapter" in str(given[0])

    def _begin(self) -> None:
        self._in_iteration = True

    def _end(self) -> None:
        self._in_iteration = False

    def _preempt(self) -> None:
        self.preempted += 1


class Child:
    def load(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._names = count()
        self._adapters = [Digest(f"sha256:{number}") for number in range(len(asked["adapters"]))]
        config = EngineConfig(
            model=with_tokenizer(Path(asked["model"]), Path(tempfile.gettempdir())),
            dtype=asked["dtype"],
            kv_cache_mib=asked["kv_mib"],
            max_model_length=asked["length"],
            max_concurrent_sequences=asked["sequences"],
            max_resident_adapters=asked["slots"],
            max_lora_rank=asked["rank"],
            prefix_cache=asked["prefix_cache"],
        )
        self._engine = load(config, lambda *_: None)
        self._counted = Counted()
        if asked["watched"]:
            self._counted.watch()
        for digest, folder in zip(self._adapters, asked["adapters"], strict=True):
            self._engine.load_adapter(digest, certify(Path(folder), self._engine.info).layout)
        return {"pages": self._engine.info.pages}

    def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        margins, masked = asked["margins"], asked.get("masked", 0)
        usual = {"max_tokens": asked["output"], "temperature": asked["temperature"], "ignore_eos": True}
        if margins:
            usual |= {"logprobs": True, "top_logprobs": 2}
        sequences = [
            self._sequence(prompt, adapter, Sampling(**usual), grammar=GRAMMAR if number < masked else None)
            for number, (prompt, adapter) in enumerate(zip(asked["prompts"], asked["adapters"], strict=True))
        ]
        tokens: dict[RequestId, list[int]] = {one.request: [] for one in sequences}
        firsts: dict[RequestId, list[float]] = {}
        began = time.perf_counter()
        for one in sequences:
            self._engine.add(one)
        while self._engine.has_work():
            for output in self._step():
                if output.error is not None:
                    raise output.error
                tokens[output.request] += output.tokens
                if output.logprobs:
                    firsts.setdefault(output.request, [logprob for _, logprob in output.logprobs[0].top])
        answer: dict[str, Any] = {"seconds": time.perf_counter() - began, "tokens": list(tokens.values())}
        if margins:
            answer["margins"] = [firsts[request][0] - firsts[request][1] for request in tokens]
        return answer

    def beside_loads(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Requests in their order, some at a time. Neighbours of the base model stream all the while."""
        usual = Sampling(max_tokens=asked["output"], ignore_eos=True)
        endless = Sampling(max_tokens=1000, ignore_eos=True)
        waiting = list(zip(asked["prompts"], asked["adapters"], strict=True))[::-1]
        live: set[RequestId] = set()
        neighbours: dict[RequestId, float | None] = {}
        failed, gaps, reads = 0, list[float](), self._counted.reads
        self._loads = 0
        while waiting or live:
            while waiting and len(live) < asked["at_once"]:
                live.add(self._add(*waiting.pop(), usual))
            while len(neighbours) < asked["neighbours"]:
                neighbours[self._add(asked["prompts"][0], None, endless)] = None
            outputs = self._step()
            now = time.perf_counter()
            for output in outputs:
                if output.request in neighbours:
                    before = neighbours[output.request]
                    gaps += [] if before is None else [now - before]
                    neighbours[output.request] = now
                if output.finish is not None:
                    failed += output.error is not None
                    live.discard(output.request)
                    neighbours.pop(output.request, None)
        for request in neighbours:
            self._engine.cancel(request)
        return {"failed": failed, "loads": self._loads, "reads": self._counted.reads - reads, "gaps": gaps}

    def under_pressure(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._engine.set_overcommit(asked["overcommit"])
        before, sampling = self._counted.preempted, Sampling(max_tokens=asked["output"], ignore_eos=True)
        self._parked = 0
        waiting = list(zip(asked["prompts"], asked["promises"], strict=True))[::-1]
        tokens: dict[RequestId, list[int]] = {}
        while waiting or self._engine.has_work():
            with suppress(Declined):  # as many as have room
                while waiting:
                    tokens[self._add(waiting[-1][0], None, sampling, waiting[-1][1])] = []
                    waiting.pop()
            for output in self._step():
                tokens[output.request] += output.tokens
        return {
            "tokens": list(tokens.values()), "parked": self._parked, "preempted": self._counted.preempted - before
        }  # fmt: skip

    _loads = _parked = 0

    def _step(self) -> list[SequenceOutput]:
        output = self._engine.step()
        for event in output.events:
            self._loads += isinstance(event, AdapterLoaded)
            self._parked += isinstance(event, ParkedNow)
        return output.sequences

    def _add(
        self, prompt: list[int], adapter: int | None, sampling: Sampling, promised: int | None = None
    ) -> RequestId:
        sequence = self._sequence(prompt, adapter, sampling, promised)
        self._engine.add(sequence)
        return sequence.request

    def _sequence(
        self,
        prompt: list[int],
        adapter: int | None,
        sampling: Sampling,
        promised: int | None = None,
        grammar: Grammar | None = None,
    ) -> NewSequence:
        number = next(self._names)
        return NewSequence(
            request=RequestId(str(number)),
            epoch=1,
            prompt=tuple(prompt),
            adapter=BASE if adapter is None else self._adapters[adapter],
            promise=pages_for(len(prompt) + (promised or sampling.max_tokens), self._engine.info.page_tokens),
            sampling=sampling,
            grammar=grammar,
            seed=number,
            seed_is_drawn=True,  # as of most clients; with a seed, vLLM draws more slowly
        )


if __name__ == "__main__":
    serve(Child())
