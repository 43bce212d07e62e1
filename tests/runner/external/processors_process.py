"""Runs in vLLM's environment, for tests: `python processors_process.py`. vLLM itself loads both logits processors. They
go through the same histories, on a CPU's tensors; what they leave is compared with what is expected."""

import os
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

from motet_runner.external.vllm.__main__ import VARIABLES

os.environ |= VARIABLES
sys.path.insert(0, str(Path(__file__).parents[3]))

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    build_custom_logits_processors,
    build_custom_logits_processors_params_validator,
)

from tests.runner.external.row_histories import ROWS, VOCABULARY, History, Request

PLACE = "motet_runner.external.vllm.processor_"
DEVICE = torch.device("cpu")
HISTORIES, ITERATIONS = 20, 30


def params(one: Request) -> SamplingParams:
    return SamplingParams(extra_args=one.extra_args, repetition_penalty=one.repetition)


class First:
    """As the first model runner calls its processor: by places in the batch, that move."""

    def __init__(self) -> None:
        config = SimpleNamespace(speculative_config=None, scheduler_config=SimpleNamespace(max_num_seqs=ROWS))
        self.processor = build_logitsprocs(config, DEVICE, False, False, [f"{PLACE}v1:Processor"]).non_argmax_invariant[
            -1
        ]
        self.at: dict[int, int] = {}
        """By place in the history: that in the batch"""

    def change(self, leave: list[int], come: list[int], running: dict[int, Request]) -> None:
        removed = sorted((self.at.pop(place) for place in leave), reverse=True)
        added, moved = [], []
        for place in come:
            self.at[place] = removed.pop() if removed else len(self.at)
            one = running[place]
            added.append((self.at[place], params(one), [], []))
        for empty in sorted(removed):  # the last ones move up
            last = max(self.at, key=self.at.__getitem__, default=None)
            if last is not None and self.at[last] > empty:
                moved.append((self.at[last], empty, MoveDirectionality.UNIDIRECTIONAL))
                self.at[last] = empty
        if len(self.at) > 1:
            one, other = list(self.at)[:2]
            moved.append((self.at[one], self.at[other], MoveDirectionality.SWAP))
            self.at[one], self.at[other] = self.at[other], self.at[one]
        changed = added or moved or removed
        update = BatchUpdate(len(self.at), removed=removed, added=added, moved=moved) if changed else None
        self.processor.update_state(update)

    def drawn(self, logits: np.ndarray, running: dict[int, Request]) -> dict[int, np.ndarray]:
        given = torch.zeros(len(self.at), VOCABULARY)
        for place, at in self.at.items():
            given[at] = torch.from_numpy(logits[place].copy())
        found = self.processor.apply(given).numpy()
        return {place: running[place].repeated(found[at]) for place, at in self.at.items()}


class Second:
    """As Model Runner V2 calls its processor: by slots, and rows in another order in each iteration."""

    def __init__(self) -> None:
        names = ("device", "max_num_reqs", "vocab_size", "all_token_ids", "prompt_len", "prefill_len", "total_len")
        states = SimpleNamespace(**dict.fromkeys(names))
        (self.processor,) = build_custom_logits_processors(SimpleNamespace(), states, False, [f"{PLACE}v2:Processor"])
        self.takes = build_custom_logits_processors_params_validator([f"{PLACE}v2:Processor"])

    def change(self, leave: list[int], come: list[int], running: dict[int, Request]) -> None:
        for place in come:
            self.takes(params(running[place]))
            changes = self.processor.add_request(place, params(running[place]))
            assert changes is (running[place].extra_args is not None)
        self.processor.apply_staged_writes()
        assert self.processor._read.keys() <= running.keys(), "slots that nobody has cost nothing"  # noqa: SLF001

    def drawn(self, logits: np.ndarray, running: dict[int, Request]) -> dict[int, np.ndarray]:
        order = sorted(running, key=lambda place: logits[place, 0])
        rows = [running[place].repeated(logits[place]) for place in order]
        given = torch.from_numpy(np.array(rows, dtype=np.float32).reshape(len(order), VOCABULARY))
        where = torch.tensor(order)
        context = LogitsContext(where, where, np.array(order, dtype=np.int64), where, where, where, np.array(order))
        found = self.processor.apply(given, context).numpy()
        return dict(zip(order, found, strict=True))


def main() -> None:
    rows = 0
    for seed in range(HISTORIES):
        history, runners = History(seed), (First(), Second())
        for _ in range(ITERATIONS):
            leave, come = history.change()
            history.allow()
            for one in runners:
                one.change(leave, come, history.running)
            logits, then = history.logits(), deepcopy(history.running)
            history.draw()  # the engine's process may be ahead
            history.allow()
            first, second = (one.drawn(logits, then) for one in runners)
            assert first.keys() == second.keys() == then.keys()
            for place, one in then.items():
                rows += 1
                expected = one.expected(logits[place])
                np.testing.assert_allclose(first[place], expected, atol=1e-5)
                np.testing.assert_allclose(second[place], expected, atol=1e-5)
    print(rows)


if __name__ == "__main__":
    main()
