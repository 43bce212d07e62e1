"""What the child asks of vLLM, without vLLM: it counts blocks as vLLM does, and a function gives the tokens."""

import importlib
import math
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import pytest

from motet.domain import pages_for
from motet_runner.external.vllm.driven import Ask, Facts, Produced
from motet_runner.external.vllm.row_changes import ChangedRow, ChangedRows, RowChanges
from motet_runner.interface import Engine, EngineConfig, Logprobs

VOCABULARY = 1000
EOS = VOCABULARY - 1
MAX_REQUESTS = 64
LOAD = "motet_runner.external.vllm.load_vllm"


def facts(**changes) -> Facts:
    usual = {
        "version": "0.32.0",
        "blocks": 64,
        "block_tokens": 16,
        "groups": 1,
        "architecture": "FakeForCausalLM",
        "layers": 1,
        "vocabulary": VOCABULARY,
        "max_model_length": 512,
        "bytes_per_token": 256,
        "dtype": "float32",
        "device": "cpu",
        "shares_prefixes": True,
    }
    return Facts(**(usual | changes))


def load_vllm_with(
    surface: Callable[[EngineConfig], object], monkeypatch: pytest.MonkeyPatch
) -> Callable[[EngineConfig], Engine]:
    """`load_vllm`, for which `surface` is vLLM"""
    monkeypatch.setitem(sys.modules, "motet_runner.external.vllm.surface", Mock(Surface=surface))
    monkeypatch.setitem(sys.modules, LOAD, Mock())
    del sys.modules[LOAD]  # it comes again, and imports this surface
    return importlib.import_module(LOAD).load_vllm


def next_token(tokens, adapter: str, changed: ChangedRow | None = None) -> int:
    """It depends on all tokens before it, so that one that is lost or comes twice changes the rest. If it is forbidden,
    or loses more than 1 by a penalty, it is the next one that is not. One that gains more than 1 comes first."""
    token = zlib.crc32(f"{list(tokens)}{adapter}".encode()) % (VOCABULARY - 1)
    if changed is None:
        return token
    read = changed.read()
    bits = None if read.bits is None else int.from_bytes(read.bits.tobytes(), "little")
    amounts = dict(zip(read.tokens.tolist(), read.amounts.tolist(), strict=True))
    candidates = [(token + further) % VOCABULARY for further in range(VOCABULARY)]
    allowed = [one for one in candidates if bits is None or bits >> one & 1]
    return min(allowed, key=lambda one: math.copysign(abs(loss := amounts.get(one, 0.0)) > 1, loss))


@dataclass
class _Request:
    ask: Ask
    tokens: list[int]
    left: int
    changed: ChangedRow | None
    computed: int = 0


@dataclass
class FakeDriven:
    facts: Facts = field(default_factory=facts)
    budget: int = 1 << 20
    """Prompt tokens of one iteration"""
    takes: Callable[[Path], None] = lambda _: None
    """Called with an adapter's folder"""
    checks: Callable[[dict[str, object]], None] = lambda _: None
    """Called with the options of a new request"""
    late: int = 0
    """Calls that give nothing before each that does"""
    asked: list[Ask] = field(default_factory=list)
    stopped: int = 0
    aborted: list[str] = field(default_factory=list)
    steps: int = 0
    most_blocks: int = 0
    known: set[tuple[str, int, tuple[int, ...]]] = field(default_factory=set)
    """What its prefix cache has: salt, adapter and the tokens up to the end of a block"""
    adapters: set[int] = field(default_factory=set)
    running: dict[str, _Request] = field(default_factory=dict)
    changes: RowChanges = field(init=False)
    changed: ChangedRows = field(default_factory=ChangedRows)

    def __post_init__(self) -> None:
        self.changes = RowChanges(MAX_REQUESTS, self.facts.vocabulary, self.facts.max_model_length)

    def check(self, options: dict[str, object]) -> None:
        self.checks(options)

    def add(self, ask: Ask) -> None:
        assert ask.name not in {one.name for one in self.asked}, "a name comes twice"
        assert not ask.adapter or ask.adapter in self.adapters, "its adapter is not there"
        self.asked.append(ask)
        changed = self.changed.row_of(self.changes.begin(ask))
        self.running[ask.name] = _Request(
            ask, list(ask.tokens), ask.options["max_tokens"], changed, self._computed_before(ask)
        )

    def _computed_before(self, ask: Ask) -> int:
        """At least one token is computed again, as a row draws from its result."""
        ends = range(self.facts.block_tokens, len(ask.tokens), self.facts.block_tokens)
        return max([end for end in ends if (ask.salt, ask.adapter, tuple(ask.tokens[:end])) in self.known], default=0)

    def allow(self, name: str, allowed: bytes) -> None:
        self.changes.allow(name, allowed)

    def abort(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            del self.running[name]
        self.changes.end(names)

    def step(self) -> list[Produced]:
        self.steps += 1
        if self.steps % (self.late + 1):
            return []
        left, made = self.budget, []
        for name, one in list(self.running.items()):
            count = min(len(one.tokens) - one.computed, left)
            one.computed += count
            left -= count
            end = one.computed - one.computed % self.facts.block_tokens
            self.known.add((one.ask.salt, one.ask.adapter, tuple(one.tokens[:end])))
            if one.computed == len(one.tokens):
                made.append(name)
        blocks = self.blocks_in_use()
        self.most_blocks = max(self.most_blocks, blocks)
        assert blocks <= self.facts.blocks, "vLLM would preempt a request"
        produced = [self._one_more(self.running[name]) for name in made]
        self.changes.take(produced)
        return produced

    def _one_more(self, one: _Request) -> Produced:
        token = next_token(one.tokens, str(one.ask.adapter), one.changed)
        one.tokens.append(token)
        one.left -= 1
        ended = not one.left or token in one.ask.options.get("stop_token_ids", ())
        if ended:
            del self.running[one.ask.name]
        logprobs = None if one.ask.options.get("logprobs") is None else self.logprobs_of(one.ask)
        asked = one.ask.options.get("prompt_logprobs") is not None
        return Produced(one.ask.name, token, logprobs, ended, self.prompt_logprobs_of(one.ask) if asked else ())

    def prompt_logprobs_of(self, ask: Ask) -> tuple[float, ...]:
        """They depend on the adapter, and on the tokens before."""
        return tuple(
            -(zlib.crc32(f"{list(ask.tokens[: place + 1])}{ask.adapter > 0}".encode()) % 1000) / 100
            for place in range(1, len(ask.tokens))
        )

    def logprobs_of(self, ask: Ask) -> Logprobs:
        return Logprobs(-1.0)

    def blocks_in_use(self) -> int:
        return sum(pages_for(one.computed, self.facts.block_tokens) for one in self.running.values())

    def stops(self) -> int:
        return self.stopped

    def load_adapter(self, number: int, folder: Path) -> None:
        assert number not in self.adapters
        self.takes(folder)
        self.adapters.add(number)

    def remove_adapter(self, number: int) -> None:
        assert not [one for one in self.running.values() if one.ask.adapter == number], "a request uses it"
        self.adapters.remove(number)
