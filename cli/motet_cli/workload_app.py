"""`motet workload`: declares its commands. `workload_commands.py` carries them out."""

from pathlib import Path
from typing import Annotated

import typer

from motet_cli.completion import (
    MAX_RATE,
    MIN_RATE,
    Adapters,
    LawName,
    Lengths,
    Rate,
    Requests,
    Speed,
    completion_of,
    law_named,
)
from motet_simulator.lines import MAX_ROWS, MAX_TOKENS
from motet_simulator.workloads.popularity import MAX_ADAPTERS

app = typer.Typer(
    name="workload",
    help="Make workloads for `motet plan`, and convert published traces to them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Output = Annotated[Path | None, typer.Option("--output", "-o", help="The workload to write. Default: print it.")]
Seed = Annotated[int, typer.Option(help="Of what is drawn at random.")]


@app.command()
def convert(  # noqa: PLR0917 - typer calls it by name
    trace: Annotated[Path, typer.Argument(help="A published trace of a known form, or a workload.")],
    output: Output = None,
    adapters: Adapters = None,
    law: LawName = "zipf",
    rate: Rate = None,
    speed: Speed = 1.0,
    lengths: Lengths = None,
    requests: Requests = None,
    seed: Seed = 0,
) -> None:
    """Convert a trace to Motet's form. What it lacks comes from a rate, a file of lengths, a law of adapters."""
    from motet_cli.workload_commands import write_to
    from motet_simulator.workloads.complete import workload

    completion = completion_of(
        rate=rate, speed=speed, lengths=lengths, adapters=adapters, law=law, requests=requests, seed=seed
    )
    raise typer.Exit(write_to(workload(trace, completion), output))


@app.command()
def make(  # noqa: PLR0917 - typer calls it by name
    requests: Annotated[int, typer.Option(min=1, max=MAX_ROWS, help="How many.")],
    rate: Annotated[float, typer.Option(min=MIN_RATE, max=MAX_RATE, help="Requests a second, at random times.")],
    law: LawName = "zipf",
    adapters: Annotated[
        int | None,
        typer.Option(
            "--adapters", min=0, max=MAX_ADAPTERS, help="How many. Default: as many as Punica's workload has."
        ),
    ] = None,
    prompt: Annotated[float, typer.Option(min=1, max=MAX_TOKENS, help="Mean tokens of a prompt.")] = 19.3,
    answer: Annotated[float, typer.Option(min=1, max=MAX_TOKENS, help="Mean tokens of an answer.")] = 58.45,
    most_output: Annotated[
        int, typer.Option("--most-output", min=1, max=MAX_TOKENS, help="Tokens of the longest answer.")
    ] = 2048,
    lengths: Lengths = None,
    seed: Seed = 0,
    output: Output = None,
) -> None:
    """Make a workload by one of Punica's laws of popularity, or by Zipf's."""
    from motet_cli.workload_commands import write_to
    from motet_simulator.workloads.punica import Made
    from motet_simulator.workloads.punica import make as made

    wanted = Made(
        requests=requests,
        rate=rate,
        law=law_named(law),
        adapters=adapters,
        prompt=prompt,
        output=answer,
        most_output=most_output,
        lengths=lengths,
        seed=seed,
    )
    raise typer.Exit(write_to(made(wanted), output))


@app.command()
def servegen(  # noqa: PLR0917 - typer calls it by name
    hours_file: Annotated[Path, typer.Argument(help="ServeGen's rates and laws by client and hour.")],
    lengths_file: Annotated[Path, typer.Argument(help="ServeGen's quantiles of lengths by client.")],
    model: Annotated[str, typer.Option(help="Such as deepseek-r1.")],
    first_hour: Annotated[int, typer.Option("--first-hour", min=0, max=MAX_TOKENS)] = 0,
    hours: Annotated[int, typer.Option(min=1, max=1000)] = 24,
    rate_factor: Annotated[
        float,
        typer.Option("--rate-factor", min=1e-6, max=1000, help="How many times each client's rate."),
    ] = 1.0,
    seed: Seed = 0,
    output: Output = None,
) -> None:
    """Make a workload of the clients that ServeGen describes."""
    from motet_cli.workload_commands import write_to
    from motet_simulator.workloads.servegen import servegen as made

    requests = made(
        hours_file,
        lengths_file,
        model=model,
        first_hour=first_hour,
        hours=hours,
        rate_factor=rate_factor,
        seed=seed,
    )
    raise typer.Exit(write_to(requests, output))


@app.command()
def show(
    trace: Annotated[Path, typer.Argument(help="A workload, or a trace of a known form.")],
    rate: Rate = None,
    lengths: Lengths = None,
    requests: Requests = None,
) -> None:
    """Print what is in a workload."""
    from motet_cli.workload_commands import show as run

    completion = completion_of(rate=rate, speed=1.0, lengths=lengths, adapters=None, law="zipf", requests=requests)
    raise typer.Exit(run(trace, completion))
