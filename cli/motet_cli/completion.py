"""Options that say where a workload gets what its trace lacks: `motet plan` and `motet workload` have them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motet.errors import SetupError
from motet_simulator.lines import MAX_ROWS
from motet_simulator.workloads.popularity import MAX_ADAPTERS

if TYPE_CHECKING:
    from motet_simulator.workloads.complete import Completion
    from motet_simulator.workloads.popularity import Law

MIN_RATE, MAX_RATE = 1e-6, 1e6


Adapters = Annotated[
    int | None,
    typer.Option("--adapters", min=0, max=MAX_ADAPTERS, help="How many adapters. Default: those of the trace."),
]
LawName = Annotated[
    str, typer.Option("--law", help="Who asks for which adapter: distinct, uniform, skewed, identical or zipf.")
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate",
        min=MIN_RATE,
        max=MAX_RATE,
        help="Requests a second at random, not at the trace's times.",
    ),
]
Speed = Annotated[
    float,
    typer.Option("--speed", min=MIN_RATE, max=MAX_RATE, help="How many times as fast the trace's times pass."),
]
Lengths = Annotated[
    Path | None, typer.Option("--lengths", help="A file of lengths: each request gets those of one of its rows.")
]
Requests = Annotated[int | None, typer.Option("--requests", min=1, max=MAX_ROWS, help="Only the first of the trace.")]


def completion_of(
    *,
    rate: float | None,
    speed: float,
    lengths: Path | None,
    adapters: int | None,
    law: str,
    requests: int | None,
    seed: int = 0,
) -> "Completion":
    from motet_simulator.workloads.complete import Completion

    return Completion(
        rate=rate, speed=speed, lengths=lengths, adapters=adapters, law=law_named(law), requests=requests, seed=seed
    )


def law_named(name: str) -> "Law":
    """Raises SetupError for a law that is unknown."""
    from motet_simulator.workloads.popularity import Law

    if name not in set(Law):
        raise SetupError(f"--law {name!r}: choose one of {', '.join(Law)}.")
    return Law(name)
