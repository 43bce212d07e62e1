"""A version of the predictor: weights of prompts' features, and what corrects them for each adapter. Pure."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from motet_predictor.calibration import Calibration
from motet_predictor.length_model import QUANTILES
from motet_predictor.prompt_weights import PromptWeights

FIRST_TRUST = 0.7
"""The part of the tilted distribution in the mixture before the first answer."""
TRUST_AFTER_CHANGE = 0.1


@dataclass(slots=True)
class Correction:
    """What follows each answer of a tenant's adapter in one version."""

    calibration: Calibration = field(default_factory=Calibration)
    trust: float = FIRST_TRUST
    """The part of the distribution by the prompt"""

    def restart(self) -> None:
        """The adapter's lengths have changed."""
        self.calibration = Calibration()
        self.trust = min(self.trust, TRUST_AFTER_CHANGE)

    def to_bytes(self) -> bytes:
        own = self.calibration
        return np.concatenate((own.below, [self.trust], own.newest)).astype("<f4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises ValueError if they are damaged. At first the newest answers were not written."""
        numbers, own = np.frombuffer(data, "<f4").astype(float), Calibration()
        count = len(own.below)
        if len(numbers) == count + 1:
            numbers = np.concatenate((numbers, own.newest))
        if len(numbers) != 2 * count + 1:
            raise ValueError(f"a damaged correction: it has {len(numbers)} numbers")
        own.below, trust, own.newest = numbers[:count], float(numbers[count]), numbers[count + 1 :]
        rise = all((np.diff(one, prepend=0.0) >= 0).all() and one[-1] < np.inf for one in (own.below, own.newest))
        if not rise or not own.below[-1] > 0 or not 0 < trust < 1:
            raise ValueError("a damaged correction: its numbers are no calibration")
        own.watch()
        return cls(own, trust)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a refit makes."""

    weights: PromptWeights
    corrections: dict[tuple[str, str], Correction]


@dataclass(slots=True)
class Judged:
    """How good a version's estimates were."""

    answers: int = 0
    loss: float = 0.0
    """The sum over all answers"""
    covered: np.ndarray = field(default_factory=lambda: np.zeros(len(QUANTILES)))
    """How many complete answers were within each quantile"""
    complete: int = 0

    def count(self, estimated: np.ndarray, tokens: int, loss: float, *, censored: bool) -> None:
        self.answers += 1
        self.loss += loss
        if not censored:
            self.complete += 1
            self.covered += tokens <= estimated


class PromptVersion:
    def __init__(self, name: str, weights: PromptWeights | None = None, *, max_adapters: int = 5000) -> None:
        """Without weights, its estimates are those of the running statistics."""
        self.name = name
        self.weights = weights
        self.made = 0.0
        """When its weights were fitted, in Unix seconds; 0: it has none."""
        self.digest = ""
        """Of its bytes in the database, as they were last written or read"""
        self.judged = Judged()
        self.decision = ""
        """Why it serves, or why it never will; empty: it is not decided"""
        self.corrections: OrderedDict[tuple[str, str], Correction] = OrderedDict()
        self.unsaved: dict[tuple[str, str], None] = {}
        """Whose corrections have changed since they were written"""
        self._max_adapters = max_adapters

    @classmethod
    def of(
        cls, name: str, fitted: Fitted, *, restarted: Iterable[tuple[str, str]] = (), max_adapters: int = 5000
    ) -> "PromptVersion":
        """`restarted`: adapters whose lengths have changed since the refit began, so that its samples say nothing."""
        made = cls(name, fitted.weights, max_adapters=max_adapters)
        made.corrections.update(
            (adapter, Correction(correction.calibration, correction.trust))
            for adapter, correction in list(fitted.corrections.items())[-max_adapters:]
        )
        for adapter in restarted:
            made.correction(*adapter).restart()
        return made

    def knows(self, space: int | None) -> bool:
        """Whether the weights were fitted to such features. None: they are."""
        return self.weights is not None and space in (None, self.weights.space)

    def correction(self, tenant: str, adapter: str) -> Correction:
        """Of an adapter that has learned now. Those that learned long ago are forgotten if there are too many."""
        own = self.corrections.get((tenant, adapter))
        if own is None:
            own = self.corrections[tenant, adapter] = Correction()
            if len(self.corrections) > self._max_adapters:
                self.unsaved.pop(self.corrections.popitem(last=False)[0], None)
        self.corrections.move_to_end((tenant, adapter))
        self.unsaved[tenant, adapter] = None
        return own

    def restore(self, tenant: str, adapter: str, correction: Correction) -> None:
        """Go on with what an earlier process has written."""
        self.correction(tenant, adapter)
        self.corrections[tenant, adapter] = correction
        self.unsaved.pop((tenant, adapter), None)
