"""What the child asks of vLLM, without vLLM: it counts blocks as vLLM does, and a function gives the tokens."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from motet_runner.external.vllm.driven import Ask, Facts, Produced
from motet_runner.interface import Logprobs

VOCABULARY = 1000
EOS = VOCABULARY - 1


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


def next_token(tokens, adapter: str) -> int:
    """It depends on all tokens before it, so that one that is lost or comes twice changes the rest."""
    return zlib.crc32(f"{list(tokens)}{adapter}".encode()) % (VOCABULARY - 1)


@dataclass
class _Request:
    ask: Ask
    tokens: list[int]
    left: int
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
    asked: list[Ask] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    steps: int = 0
    most_blocks: int = 0
    adapters: set[int] = field(default_factory=set)
    running: dict[str, _Request] = field(default_factory=dict)

    def check(self, options: dict[str, object]) -> None:
        self.checks(options)

    def add(self, ask: Ask) -> None:
        assert ask.name not in {one.name for one in self.asked}, "a name comes twice"
        assert not ask.adapter or ask.adapter in self.adapters, "its adapter is not there"
        self.asked.append(ask)
        self.running[ask.name] = _Request(ask, list(ask.tokens), ask.options["max_tokens"])

    def abort(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            del self.running[name]

    def step(self) -> list[Produced]:
        self.steps += 1
        left, made = self.budget, []
        for name, one in list(self.running.items()):
            count = min(len(one.tokens) - one.computed, left)
            one.computed += count
            left -= count
            if one.computed == len(one.tokens):
                made.append(name)
        blocks = sum(-(-one.computed // self.facts.block_tokens) for one in self.running.values())
        self.most_blocks = max(self.most_blocks, blocks)
        assert blocks <= self.facts.blocks, "vLLM would preempt a request"
        return [self._one_more(self.running[name]) for name in made]

    def _one_more(self, one: _Request) -> Produced:
        token = next_token(one.tokens, str(one.ask.adapter))
        one.tokens.append(token)
        one.left -= 1
        ended = not one.left or token in one.ask.options.get("stop_token_ids", ())
        if ended:
            del self.running[one.ask.name]
        logprobs = None if one.ask.options.get("logprobs") is None else self.logprobs_of(one.ask)
        return Produced(one.ask.name, token, logprobs, ended)

    def logprobs_of(self, ask: Ask) -> Logprobs:
        return Logprobs(-1.0)

    def load_adapter(self, number: int, folder: Path) -> None:
        assert number not in self.adapters
        self.takes(folder)
        self.adapters.add(number)

    def remove_adapter(self, number: int) -> None:
        assert not [one for one in self.running.values() if one.ask.adapter == number], "a request uses it"
        self.adapters.remove(number)
