"""What a profile's fields may be, so that each simulation with them ends, in bounded memory."""

from collections.abc import Mapping
from typing import NamedTuple

from motet.domain import MAX_LORA_RANK
from motet_runner.plan.presets import PRESETS
from motet_simulator.lines import MAX_TOKENS
from motet_simulator.profiles.limits import MAX_BYTES, MAX_ITERATION_SECONDS, MAX_PAGES, MAX_PLACES


class Number(NamedTuple):
    kind: type
    least: float
    most: float
    nullable: bool = False


Bound = Number | type[str] | tuple[object, ...]
"""A tuple has all that there may be."""

SECONDS = Number(float, 0.0, MAX_ITERATION_SECONDS)
SECONDS_OF_DECODES = Number(float, 0.0, 10 * MAX_ITERATION_SECONDS)
"""A fitted law may reach beyond what was seen."""

FACTOR = Number(float, 1e-6, 1e6)
"""A residual."""

COUNT = Number(int, 1, MAX_PLACES)

PROFILE: Mapping[str, Bound] = {"machine": str, "model": str, "kernels": str, "steps": Number(int, 0, 1 << 53)}

ENGINE: Mapping[str, Bound] = {
    "pages": Number(int, 1, MAX_PAGES),
    "page_bytes": Number(int, 1, MAX_BYTES),
    "adapter_rank_bytes": Number(int, 1, MAX_BYTES),
    "adapter_rank_tile": Number(int, 1, MAX_LORA_RANK),
    "host_pages": Number(int, 0, MAX_PAGES),
    "max_sequences": COUNT,
    "max_model_length": Number(int, 1, MAX_TOKENS),
    "adapter_slots": COUNT,
    "cached_adapters": COUNT,
    "preset": tuple(PRESETS),
    "prefill_chunk_tokens": Number(int, 1, MAX_TOKENS),
    "decode_slowdown": Number(float, 1.0, 1e6, nullable=True),
    "tpot_seconds": Number(float, 1e-6, 1e6, nullable=True),
    "prefix_cache": (True, False),
}

LAW: Mapping[str, Bound] = {
    "fixed": Number(float, 1e-9, MAX_ITERATION_SECONDS),
    "context": SECONDS,
    "prefill": SECONDS,
    "attended": SECONDS,
    "adapters": SECONDS,
}

OVERHEADS: Mapping[str, Bound] = {
    "arrival": SECONDS,
    "submit": SECONDS,
    "delivery": SECONDS,
    "adapter_load": SECONDS,
    "adapter_byte": SECONDS,
    "swapped_page": SECONDS,
}


def check_fields(part: str, given: object, bounds: Mapping[str, Bound]) -> None:
    """Raises ValueError for the first attribute that is out of its bounds."""
    for name, bound in bounds.items():
        value = getattr(given, name)
        if isinstance(bound, Number):
            check_number(part + name, value, bound)
        elif isinstance(bound, tuple):
            if not any(type(value) is type(one) and value == one for one in bound):
                raise ValueError(f"{part}{name} is {_short(value)}: it must be one of {', '.join(map(str, bound))}")
        elif type(value) is not bound:
            raise ValueError(f"{part}{name} is {_short(value)}: it must be a text")


def check_number(name: str, value: object, bound: Number) -> None:
    if value is None and bound.nullable:
        return
    kinds = (int,) if bound.kind is int else (int, float)
    if type(value) not in kinds or not bound.least <= value <= bound.most:  # type: ignore[operator]
        what = "a whole number" if bound.kind is int else "a number"
        least, most = (str(one) if bound.kind is int else f"{one:g}" for one in (bound.least, bound.most))
        raise ValueError(f"{name} is {_short(value)}: it must be {what} from {least} to {most}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
