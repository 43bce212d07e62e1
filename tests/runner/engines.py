"""Engines to test with, and the shortest way to run something through them."""

import os
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch

from motet.domain import BASE, PAGE_TOKENS, Digest, RequestId, pages_for
from motet.prefix_hints import prefix_salt
from motet_runner.adapters.certification import certify
from motet_runner.engine import Engine
from motet_runner.execute.forward.program import SWITCHED_ON
from motet_runner.execute.kernels.compiled import compiled_back_end
from motet_runner.execute.kernels.roles import Kernels, by_role
from motet_runner.execute.kernels.torch import torch_back_end
from motet_runner.interface import EngineConfig, Event, Logprobs, NewSequence, Sampling, SequenceOutput
from testbed.compiled_kernels import CACHE, compiled_library
from tests.runner.judged_once import started
from tests.support.device import DEVICE

BASE_DIGEST = Digest("sha256:base")
PLAN_AHEAD = int(os.environ.get("MOTET_RUNNER_PLAN_AHEAD", "0"))
"""All tests of engines also hold with 1: `make soak` runs them so."""
KERNELS = os.environ.get("MOTET_RUNNER_KERNELS", "torch")
"""All tests of engines also hold with cpp and, on a GPU or in Triton's interpreter, with triton."""
ANYWHERE = ("torch", "triton")
"""These kernels compute on the tests' device, the others on a CPU."""


def make_engine(base: Path, *, switched_on: Collection[str] = SWITCHED_ON, **settings) -> Engine:
    usual = {"kv_cache_mib": 4, "plan_ahead": PLAN_AHEAD, "kernels": KERNELS, "kernel_cache": CACHE}
    kernels = settings.get("kernels", KERNELS)
    if kernels in ANYWHERE:  # torch's results depend on the number in their last digits
        usual["threads"] = 1
    usual["device"] = device_of(kernels).type
    return started(EngineConfig(model=base, **(usual | settings)), switched_on=switched_on)


def device_of(kernels: str) -> torch.device:
    return DEVICE if kernels in ANYWHERE else torch.device("cpu")


def kernels_named(name: str) -> Kernels:
    """torch's with packed weights, or the compiled ones"""
    return by_role(torch_back_end(packed=True) if name == "torch" else compiled_back_end(compiled_library(), "any"))


def make_device_engine(base: Path, **settings) -> Engine:
    """Its worker is that of a GPU, with a CPU in its place."""
    with patch("motet_runner.engine.computes_by_itself", lambda _: True):
        return make_engine(base, **settings)


def make_local_engine(base: Path, **settings) -> Engine:
    with patch("motet_runner.engine.computes_by_itself", lambda _: False):
        return make_engine(base, **settings)


def make_engine_of_modules(base: Path, **settings) -> Engine:
    """The reference: it computes with the modules of transformers, as they were loaded."""
    with patch("motet_runner.execute.kernels.packed_model.PackedModel.parts", lambda _: iter(())):
        return make_engine(base, **settings | {"kernels": "torch"})


def load(engine: Engine, digest: Digest, folder: Path) -> None:
    """As the service does it: check an adapter's folder, and say where its bytes lie."""
    engine.load_adapter(digest, certify(folder, engine.info).layout)


def step_beside_load(engine: Engine, ran: "EngineRun") -> None:
    """An iteration, and time for the thread that reads an adapter: iterations of a tiny model are over before it has
    begun to read."""
    ran.take(engine)
    time.sleep(0.005)


def ask(
    request: str,
    *,
    prompt: int | tuple[int, ...] = 20,
    promise: int | None = None,
    adapter: Digest = BASE,
    epoch: int = 1,
    delivered: tuple[int, ...] = (),
    seed: int = 0,
    choice: int = 0,
    tenant: str | None = None,
    parent: str | None = None,
    scored: int = 0,
    **sampling,
) -> NewSequence:
    """With a tenant, it may share the pages of prompts that begin alike."""
    sampling = {"max_tokens": 40, "ignore_eos": True} | sampling
    if isinstance(prompt, int):
        prompt = tuple(2 + (i * 7 + 3 * sum(map(ord, request))) % 500 for i in range(prompt))
    return NewSequence(
        request=RequestId(request),
        epoch=epoch,
        choice=choice,
        prompt=prompt,
        delivered=delivered,
        scored=scored,
        adapter=adapter,
        promise=promise or pages_for(len(prompt) + sampling["max_tokens"], PAGE_TOKENS),
        sampling=Sampling(**sampling),
        seed=seed,
        tenant=tenant or "",
        parent=None if parent is None else RequestId(parent),
        prefix_salt=b"" if tenant is None else prefix_salt(BASE_DIGEST, adapter, tenant),
    )


@dataclass
class EngineRun:
    tokens: dict[str, list[int]] = field(default_factory=dict)
    scores: dict[str, list[Logprobs]] = field(default_factory=dict)
    """Log probabilities of prompts, from the second token on or from the first one that the client does not have"""
    _scored_to: dict[str, int] = field(default_factory=dict)
    last: dict[str, SequenceOutput] = field(default_factory=dict)
    outputs: list[SequenceOutput] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def take(self, engine: Engine) -> None:
        output = engine.step()
        for one in output.sequences:
            self.tokens.setdefault(one.request, []).extend(one.tokens)
            self.last[one.request] = one
            if one.prompt_logprobs:
                known = self._scored_to.get(one.request, one.prompt_index)
                assert one.prompt_index == known, "in order, and none twice"
                self._scored_to[one.request] = known + len(one.prompt_logprobs)
                self.scores.setdefault(one.request, []).extend(one.prompt_logprobs)
        self.outputs += output.sequences
        self.events += output.events
        engine.check()

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


def run(engine: Engine, *sequences: NewSequence, steps: int | None = None, ran: EngineRun | None = None) -> EngineRun:
    """Everything to its end, or `steps` iterations of it."""
    ran = ran or EngineRun()
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work() and steps != 0:
        ran.take(engine)
        steps = None if steps is None else steps - 1
    return ran
