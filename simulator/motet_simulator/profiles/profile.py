"""A profile: how long iterations take on one machine, with one model and one set of kernels.

The mean follows a law of what an iteration computes. A busy machine strays far from its mean, so the profile keeps what
was seen around it: the measured time of each iteration over the law's, in the order in which they came. `step_times`
draws from that.
"""

import json
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from motet.domain import PAGE_TOKENS, adapter_pages
from motet.errors import SetupError
from motet_simulator.output_file import output_file
from motet_simulator.profiles import bounds
from motet_simulator.profiles.bounds import check_fields, check_number

VERSION = 1

MAX_BYTES = 16 << 20
"""Of a profile's file. One with the most residuals has less than 1 MiB."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one iteration computes."""

    decodes: int = 0
    context: int = 0
    """Tokens to which its decodes attend, themselves included."""
    prefill: int = 0
    """Prompt tokens."""
    attended: int = 0
    """Tokens to which each prompt token attends, all added up."""
    adapters: int = 0
    """Different ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaw:
    """Seconds of an iteration: a sum, with nothing negative in it."""

    fixed: float
    decodes: tuple[tuple[int, float], ...] = ()
    """Decodes, and the seconds that they add. Straight between two of these points, and beyond the last two."""
    context: float = 0.0
    """For each token that decodes attend to."""
    prefill: float = 0.0
    attended: float = 0.0
    adapters: float = 0.0

    def seconds(self, work: Work) -> float:
        of_prompts = self.prefill * work.prefill + self.attended * work.attended
        constant = self.fixed + self.seconds_of_decodes(work.decodes)
        return constant + self.context * work.context + self.adapters * work.adapters + of_prompts

    def seconds_of_decodes(self, count: int) -> float:
        before_count, before = 0, 0.0
        slope = 0.0
        for known, seconds in self.decodes:
            slope = (seconds - before) / (known - before_count)
            if count <= known:
                break
            before_count, before = known, seconds
        return before + slope * (count - before_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Measured seconds over the law's, one iteration after the other. Without any, every iteration takes what the law
    says."""

    decoding: tuple[float, ...] = ()
    """Of iterations that only decode."""
    prompts: tuple[float, ...] = ()
    """Of those with prompt tokens."""
    decoding_seconds: tuple[float, ...] = ()
    """The law's seconds of each of the iterations in `decoding`. Empty: nothing depends on them."""
    prompts_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """What bounds the batches of a runner."""

    pages: int
    page_bytes: int
    adapter_rank_bytes: int
    adapter_rank_tile: int = 1
    host_pages: int = 0
    max_sequences: int = 64
    max_model_length: int = 2048
    adapter_slots: int = 16
    cached_adapters: int = 64
    preset: str = "paged-chunk"
    prefill_chunk_tokens: int = 512
    decode_slowdown: float | None = 2.0
    tpot_seconds: float | None = None
    prefix_cache: bool = True

    def adapter_pages(self, rank: int) -> int:
        return adapter_pages(
            rank, rank_bytes=self.adapter_rank_bytes, tile=self.adapter_rank_tile, page_bytes=self.page_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds outside of iterations."""

    arrival: float = 0.003
    """From the client's request to its placement by an idle scheduler: tokenizing, the estimate, two messages."""
    submit: float = 0.001
    """From the placement until the engine has the request."""
    delivery: float = 0.001
    """From the end of an iteration until the gateway has its tokens."""
    adapter_load: float = 0.01
    """To load an adapter, without its bytes."""
    adapter_byte: float = 1e-9
    swapped_page: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    machine: str
    model: str
    kernels: str
    engine: EngineSize
    law: StepLaw
    residuals: Residuals = field(default_factory=Residuals)
    overheads: Overheads = field(default_factory=Overheads)
    steps: int = 0
    """How many iterations it was fitted from. 0: it comes from a table or a law."""

    def write(self, path: Path) -> None:
        """Raises SetupError for a profile that could not be read again, and for a file that cannot be written."""
        try:
            self.check()
        except ValueError as error:
            raise SetupError(f"{path} is not written: {error}.") from error
        with output_file(path) as file:
            file.write(json.dumps({"motet_profile": VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises SetupError for a file that is no profile."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise SetupError(f"{path} is larger than {MAX_BYTES >> 20} MiB: it is no profile.")
            return cls.from_dict(json.loads(data))
        except OSError as error:
            raise SetupError(f"{path}: {error.strerror}.") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise SetupError(f"{path} is no profile that `motet profile` has written: {error}.") from error

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Self:
        """Raises ValueError, TypeError or KeyError for something else."""
        given = dict(given)
        version = given.pop("motet_profile")
        if version != VERSION:
            raise ValueError(f"its version is {version}, and this is {VERSION}")
        law = dict(given.pop("law"))
        law["decodes"] = tuple((count, seconds) for count, seconds in law.get("decodes", ()))
        residuals = {kind: tuple(values) for kind, values in given.pop("residuals", {}).items()}
        profile = cls(
            engine=EngineSize(**given.pop("engine")),
            law=StepLaw(**law),
            residuals=Residuals(**residuals),
            overheads=Overheads(**given.pop("overheads", {})),
            **given,
        )
        profile.check()
        return profile

    def check(self) -> None:
        """Raises ValueError for what no simulation could take."""
        check_fields("", self, bounds.PROFILE)
        check_fields("engine.", self.engine, bounds.ENGINE)
        check_fields("law.", self.law, bounds.LAW)
        check_fields("overheads.", self.overheads, bounds.OVERHEADS)
        for count, seconds in self.law.decodes:
            check_number("a count in law.decodes", count, bounds.COUNT)
            check_number("a time in law.decodes", seconds, bounds.SECONDS_OF_DECODES)
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(self.law.decodes)):
            raise ValueError("law.decodes must ascend: more decodes may not cost less")
        residuals = self.residuals
        for kind, factors, sizes in (
            ("decoding", residuals.decoding, residuals.decoding_seconds),
            ("prompts", residuals.prompts, residuals.prompts_seconds),
        ):
            for factor in factors:
                check_number("a residual", factor, bounds.FACTOR)
            for seconds in sizes:
                check_number("the size of a residual", seconds, bounds.SECONDS)
            if sizes and len(sizes) != len(factors):
                raise ValueError(f"residuals.{kind}_seconds must have a number for each in residuals.{kind}")

    @property
    def context_tokens(self) -> int:
        return min(self.engine.max_model_length, self.engine.pages * PAGE_TOKENS)
