"""Runs a model to check that Motet computes it correctly.

With `set_attn_implementation`, some models only warn and use their own attention; other models mix tokens outside
attention. So a probe checks: our attention is called exactly once per layer, with the shapes of the KV pages; a
sequence has the same logits with any neighbours, and when it is cut in two. The probe also assigns each attention
module its layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from motet.errors import ModelFolderError
from motet_runner.execute.adapters.lora_linears import features, linears_with_lora
from motet_runner.execute.forward import attention
from motet_runner.execute.forward.modules import LoadedModel
from motet_runner.execute.forward.trial import Trial, text
from motet_runner.execute.forward.wide_modules import wide

EXACT = torch.float64
"""The type in which the probe compares logits: rounding is far below the effect of another token."""
SAME = 1e-9
"""The allowed difference of logits, relative to the largest logit: products of other shapes round differently"""


class ModelCheck:
    """Runs a few tokens through the model and observes its calls."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._name = loaded.architecture
        self._seen: list[torch.nn.Module] = []
        self._windows: list[int | None] = []
        self._fed: dict[str, list[tuple[torch.Tensor, float]]] = {}
        """Linear → each input tensor with its sum, in the order of the first calls. The tensors are kept alive, so that
        their ids are unique. A tensor that was changed in between has another sum."""

    def run(self) -> None:
        loaded = self._loaded
        first = self._text(21, stride=7, first=3)
        with torch.inference_mode():
            with self._watch_linears():
                batch = Trial(loaded, [first]).batch({0: len(first)}, every_token=False)
                batch.watcher = self._look
                loaded.forward(batch)
            self._check_calls()
            self._check_neighbours(first)
            with wide(loaded, EXACT) as exact:
                whole = self._check_parts(exact, first)
                self._check_attention(exact, first, whole)
        windows = [window for window in self._windows if window]
        loaded.window = max(windows) if len(windows) == loaded.shape.layers else None
        rows = {path: [fed.shape[:-1].numel() for fed, _ in calls] for path, calls in self._fed.items()}
        loaded.linears = linears_with_lora(loaded.model, rows, tokens=len(first))
        groups: dict[tuple[int, float], list[str]] = {}
        for path, ((fed, total), *_) in self._fed.items():
            if path in loaded.linears:
                groups.setdefault((id(fed), total), []).append(path)
        loaded.linear_groups = [tuple(group) for group in groups.values()]

    def _text(self, count: int, *, stride: int, first: int) -> list[int]:
        return text(count, stride=stride, first=first, vocabulary=self._loaded.vocabulary)

    def _check_neighbours(self, tokens: list[int]) -> None:
        """All neighbours have equal lengths, so products have equal shapes: only mixing tokens changes a bit."""
        neighbours = [[self._text(count, stride=11, first=count + mark) for count in (6, 5)] for mark in (0, 400)]

        def beside(loaded: LoadedModel, before: list[int], after: list[int]) -> torch.Tensor:
            texts = [before, tokens, after]
            return Trial(loaded, texts).logits({row: len(one) for row, one in enumerate(texts)})[1]

        one, other = (beside(self._loaded, *texts) for texts in neighbours)
        if torch.equal(one, other):
            return
        # Neighbours change how many rows an expert gets: its products then have other shapes and other last digits.
        with wide(self._loaded, EXACT) as exact:
            one, other = (beside(exact, *texts) for texts in neighbours)
        self._check_mixture("beside another", one, other)

    def _check_parts(self, exact: LoadedModel, tokens: list[int]) -> torch.Tensor:
        """→ the logits of each token"""
        first, tail = tokens[:9], 4
        trial = Trial(exact, [tokens, tokens, first])
        begun = trial.logits({0: len(tokens), 1: len(tokens) - tail, 2: len(first) - 1})
        ended = trial.logits({1: tail, 2: 1})
        for row, way in ((1, "in two parts"), (2, "token by token")):
            parts = torch.cat((begun[row], ended[row]))
            self._check_mixture(way, begun[0][: len(parts)], parts)
        return begun[0]

    def _check_attention(self, exact: LoadedModel, tokens: list[int], expected: torch.Tensor) -> None:
        """Compares our attention with transformers' own"""
        model = exact.model
        model.set_attn_implementation("eager")
        try:
            theirs = Trial(exact, [tokens]).logits({0: len(tokens)})[0]
        finally:
            model.set_attn_implementation(attention.NAME)
        difference = _difference(theirs, expected)
        if not difference <= SAME:
            raise ModelFolderError(
                f"not yet: {self._name} gives other logits with our attention than with its own "
                f"(by {difference:.2g} of the largest)."
            )

    def _check_mixture(self, way: str, expected: torch.Tensor, logits: torch.Tensor) -> None:
        difference = _difference(expected, logits)
        if not difference <= SAME:
            raise ModelFolderError(
                f"not yet: {self._name} gives other logits when a sequence is computed {way} (by {difference:.2g} of "
                "the largest); something besides attention mixes its tokens."
            )

    def _check_calls(self) -> None:
        layers = self._loaded.shape.layers
        if len(self._seen) != layers or len(set(map(id, self._seen))) != layers:
            raise ModelFolderError(
                f"not yet: {self._name} called our attention {len(self._seen)} times in one pass of {layers} layers; "
                "it does not go through transformers' attention interface once a layer."
            )
        window = getattr(self._loaded.config, "sliding_window", None)
        kinds = getattr(self._loaded.config, "layer_types", None) or []
        if "sliding_attention" in kinds:
            expected = [kind == "sliding_attention" for kind in kinds]
            if [bool(seen) for seen in self._windows] != expected:
                raise ModelFolderError(
                    f"not yet: {self._name} has sliding layers, and does not give their window to our attention."
                )
        elif (
            window and not kinds and getattr(self._loaded.config, "use_sliding_window", True) and not any(self._windows)
        ):
            raise ModelFolderError(f"not yet: {self._name} does not give its sliding window to our attention.")

    def _look(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: dict[str, Any],
    ) -> None:
        self._seen.append(module)
        if len(self._seen) > self._loaded.shape.layers:
            self._check_calls()
        attention.assign_layer(module, len(self._seen) - 1, options["sliding_window"])
        self._windows.append(options["sliding_window"])
        shape = self._loaded.shape
        expected = (1, shape.kv_heads, query.shape[2], shape.head_dim)
        if tuple(key.shape) != expected or tuple(value.shape) != expected:
            raise ModelFolderError(
                f"not yet: {self._name} has keys {tuple(key.shape)} and values {tuple(value.shape)} in one layer "
                f"where its config says {expected}."
            )
        if getattr(module, "is_causal", True) is False:
            raise ModelFolderError(f"not yet: {self._name} attends to later tokens.")
        known = attention.UNDERSTOOD | attention.HARMLESS
        unknown = sorted(name for name, given in options.items() if given is not None and name not in known)
        if unknown:
            raise ModelFolderError(f"not yet: {self._name} attends with {', '.join(unknown)}.")

    @contextmanager
    def _watch_linears(self) -> Iterator[None]:
        """Notes each linear's inputs. Only linears that get exactly the iteration's rows can have LoRA."""

        def watch(path: str) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
            return lambda _, args: self._fed.setdefault(path, []).append((args[0], float(args[0].double().sum())))

        hooks = [
            module.register_forward_pre_hook(watch(path))
            for path, module in self._loaded.model.named_modules()
            if features(module)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _difference(expected: torch.Tensor, logits: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected logit"""
    return float((logits - expected).abs().max()) / max(float(expected.abs().max()), torch.finfo(EXACT).tiny)
