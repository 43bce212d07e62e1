"""The figures of a version as JSON, as `motet predict` shows them. Pure."""

import json

import numpy as np

from motet_predictor.comparison import Comparison
from motet_predictor.length_model import QUANTILES
from motet_predictor.prompt_version import Judged, PromptVersion

MAX_FIGURES = 4000
"""Of the column"""


def as_json(version: PromptVersion, comparison: Comparison | None) -> str:
    judged = version.judged
    figures: dict[str, object] = {
        "answers": judged.answers,
        "complete": judged.complete,
        "loss": round(judged.loss, 4),
        "covered": judged.covered.astype(int).tolist(),
        "decision": version.decision,
    }
    if comparison is not None and comparison.prompts > 1:
        gain = comparison.gain()
        figures |= {"compared": comparison.answers, "prompts": comparison.prompts}
        figures |= {"gain": round(gain.mean, 5), "error": round(gain.error, 5)}
    return json.dumps(figures)


def with_decision(figures: str, decision: str) -> str:
    """The same figures with another decision. Damaged ones are left out."""
    try:
        kept = json.loads(figures)
    except (ValueError, RecursionError):
        kept = {}
    text = json.dumps((kept if isinstance(kept, dict) else {}) | {"decision": decision})
    return text if len(text) <= MAX_FIGURES else json.dumps({"decision": decision})


def restore(version: PromptVersion, figures: str) -> None:
    """Go on counting from what was kept. What is damaged begins at zero."""
    try:
        kept = json.loads(figures)
        covered = np.array([int(count) for count in kept["covered"]], float)
        judged = Judged(int(kept["answers"]), float(kept["loss"]), covered, int(kept["complete"]))
        decision = str(kept["decision"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return
    if covered.shape == (len(QUANTILES),) and np.isfinite(judged.loss):
        version.judged, version.decision = judged, decision
