"""Every baseline is this engine with different numbers: data, not branches.

A preset sets what the composer reads: how much prefill an iteration takes, and who joins a batch when. It also sets
what the scheduler promises a request on such a runner, by the rules of `motet.promises`.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from motet.errors import SetupError
from motet.promises import PromiseRule

UNBOUNDED = 1 << 60
"""More than any number of tokens, sequences or pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    says: str
    promise: PromiseRule = PromiseRule.EXPECTED
    """What a request is promised when it is admitted."""
    overcommit: float = 1.0
    """The factor by which promises may exceed the pages. Only comparisons of presets use it: on a runner, the
    supervisor sets the factor."""
    admission: Literal["promises", "forecast"] = "promises"
    """Which requests may join: those whose promise fits beside the other promises, or those with which the largest
    future need of the whole batch fits (see `plan.forecast`)."""
    contiguous: bool = False
    """Whether a sequence takes pages for its whole promise when it begins, as one run, and appends in place (S3-08).
    Otherwise it takes each page when it needs it. `engine.contiguous` sets this."""
    prefill_tokens: int | None = None
    """Prompt tokens in one iteration, with decodes if there are `pauses`; None: any number."""
    prefills: int | None = None
    """Sequences in their prompt phase in one iteration; None: any number."""
    chunked: bool = False
    """Prompts may be cut at the iteration's prefill tokens; otherwise a prompt is taken as a whole or not at all."""
    request_level: bool = False
    """No sequence joins until all running ones have finished (OR-18)."""
    order: Literal["arrival", "largest first"] = "arrival"
    """Which sequence starts first when places or pages are short: by arrival (OR-07), or by promise, largest first
    (S3-05)."""
    pauses: int = 0
    """How many times a decoding sequence may be left out of an iteration for prompts (SW-13, SW-14); it keeps its KV.
    0: decodes are never paused."""


PRESETS: dict[str, Preset] = {
    "ft-max": Preset(says="iteration-level, whole prompts, promise = the model's maximum", promise=PromiseRule.CONTEXT),
    "request-level": Preset(
        says="a batch runs until its longest request ends; promise = the model's maximum (OR-18)",
        promise=PromiseRule.CONTEXT,
        request_level=True,
    ),
    "orca": Preset(
        says="iteration-level, whole prompts, promise = prompt + max_tokens", promise=PromiseRule.MAX_TOKENS
    ),
    "s3": Preset(
        says="promise = prompt + the upper edge of the predicted bucket, largest first; on overflow park and double",
        promise=PromiseRule.BUCKET,
        order="largest first",
    ),
    "oracle": Preset(says="promise = prompt + true length, largest first", order="largest first"),
    "punica": Preset(
        says="one whole prompt an iteration beside all decodes (PU-09); promise = prompt + one page",
        promise=PromiseRule.NEXT_PAGE,
        overcommit=inf,
        prefills=1,
    ),
    "paged-chunk": Preset(
        says="prompts in chunks beside all decodes; a request joins while the largest need that is forecast fits",
        admission="forecast",
        prefill_tokens=512,
        chunked=True,
    ),
    "paged-promises": Preset(
        says="as paged-chunk, but a request joins while the sum of all promises fits", prefill_tokens=512, chunked=True
    ),
}
SPLITWISE_MACHINE = Preset(
    says="prompts first, whole, 2048 tokens an iteration; decodes without room are paused, at most four times each",
    prefill_tokens=2048,
    pauses=4,
)
"""How one machine of Splitwise composes its batches (SW-11, SW-13, SW-14). The preset of that name needs runners with
roles as well, so it cannot be chosen yet."""

NOT_YET = ("splitwise", "flexgen")


def preset_named(name: str, *, contiguous: bool = False) -> Preset:
    if name in PRESETS:
        preset = PRESETS[name]
        if contiguous and preset.admission == "forecast":
            allowed = ", ".join(one for one, each in PRESETS.items() if each.admission == "promises")
            raise SetupError(
                f"engine.contiguous needs a preset that admits by promises, and {name} admits by a forecast. Choose "
                f"one of {allowed}, or omit engine.contiguous."
            )
        return replace(preset, contiguous=contiguous)
    known = ", ".join(PRESETS)
    if name in NOT_YET:
        raise SetupError(f"not yet: engine.preset {name!r}. Choose one of {known}.")
    raise SetupError(f"engine.preset {name!r} is unknown. Choose one of {known}.")
