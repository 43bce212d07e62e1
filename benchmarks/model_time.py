"""How long the calls of a model take, seen from outside."""

import cProfile
import time
from collections.abc import Callable

import torch

from motet_runner.execute.batch.flat_batch import FlatBatch
from motet_runner.execute.forward.modules import LoadedModel

Forward = Callable[[FlatBatch], torch.Tensor]


class ModelTime:
    """Stops `profile`, if there is one, while the model runs."""

    def __init__(self, profile: cProfile.Profile | None = None) -> None:
        self._began = 0.0
        self._profile = profile
        self.calls: list[float] = []
        """Seconds of each call"""

    def watch(self, loaded: LoadedModel) -> None:
        """From now on, whatever computes this model."""
        if loaded.fused is None:
            self.watch_module(loaded.model)
        else:
            loaded.fused = self.timed(loaded.fused)  # type: ignore[assignment] # it is only called

    def watch_module(self, model: torch.nn.Module) -> None:
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def timed(self, forward: Forward) -> Forward:
        """A forward pass that is no module"""

        def call(batch: FlatBatch) -> torch.Tensor:
            self._begin()
            try:
                return forward(batch)
            finally:
                self._end()

        return call

    def _begin(self, *_: object) -> None:
        if self._profile is not None:
            self._profile.disable()
        self._began = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.calls.append(time.perf_counter() - self._began)
        if self._profile is not None:
            self._profile.enable()
