"""Steps of a program that one step can do, brought together (PU-21, OR-17).

Each kind knows one shape of steps, as the modules of many families leave it, and no family. Its step gives the bits of
those that it stands for: it rounds where they round. Whatever has another shape stays as it is.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

from motet_kernels.cpp.peepholes.activation import silu_times
from motet_kernels.cpp.peepholes.matching import Found, Uses
from motet_kernels.cpp.peepholes.norms import modules_norm, sum_and_norm
from motet_kernels.cpp.peepholes.rotation import rotate
from motet_kernels.cpp.steps import Step, Value, needed

PEEPHOLES: dict[str, Callable[[Uses, int], Found | None]] = {
    "modules_norm": modules_norm,
    "sum_and_norm": sum_and_norm,
    "rotate": rotate,
    "silu_times": silu_times,
}
"""In the order in which they look: some look for what others have made."""


def brought_together(
    steps: Sequence[Step], logits: Value, kinds: Collection[str] = PEEPHOLES.keys()
) -> tuple[list[Step], Counter[str]]:
    """The steps that something comes of, and how often each kind was found."""
    left = needed(steps, logits)
    counts = Counter[str]()
    for kind, find in PEEPHOLES.items():
        if kind not in kinds:
            continue
        uses = Uses(left)
        instead: dict[int, Step | None] = {}
        for number in range(len(left)):
            found = find(uses, number)
            if found is not None and instead.keys().isdisjoint(found.steps):
                instead |= dict.fromkeys(found.steps, None) | {max(found.steps): found.by}
                counts[kind] += 1
        left = [step for number, old in enumerate(left) if (step := instead.get(number, old)) is not None]
    return left, counts
