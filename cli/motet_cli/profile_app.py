"""`motet profile`: declares its commands. `profile_commands.py` carries them out."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motet.domain import PAGE_TOKENS
from motet_simulator.lines import MAX_TOKENS
from motet_simulator.profiles.limits import MAX_PAGES, MAX_PLACES

if TYPE_CHECKING:
    from motet_simulator.profiles.profile import EngineSize

app = typer.Typer(
    name="profile",
    help="Say how long the iterations of a runner take, for `motet plan`.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Output = Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")]


def _engine(
    *,
    kv_tokens: Annotated[
        int,
        typer.Option(
            min=PAGE_TOKENS, max=MAX_PAGES * PAGE_TOKENS, help="Tokens whose keys and values fit into memory."
        ),
    ],
    max_sequences: Annotated[
        int, typer.Option(min=1, max=MAX_PLACES, help="The most sequences in one iteration.")
    ] = 64,
    max_model_length: Annotated[
        int, typer.Option(min=1, max=MAX_TOKENS, help="Tokens of prompt and answer together.")
    ] = 4096,
    adapter_slots: Annotated[int, typer.Option(min=1, max=MAX_PLACES, help="The most adapters in device memory.")] = 16,
    adapter_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_TOKENS,
            help="An adapter of rank 16 takes as much memory as the KV of this many tokens.",
        ),
    ] = 256,
) -> "EngineSize":
    from motet_simulator.profiles.tables import engine_size

    return engine_size(
        kv_tokens=kv_tokens,
        max_sequences=max_sequences,
        max_model_length=max_model_length,
        adapter_slots=adapter_slots,
        adapter_tokens=adapter_tokens,
    )


def _of_an_engine(command: Callable[..., None]) -> Callable[..., None]:
    """The command has the options of `_engine` besides its own, and is given the engine that they describe."""
    own, shared = signature(command).parameters, signature(_engine).parameters

    @wraps(command)
    def run(**given: Any) -> None:
        engine = _engine(**{name: given.pop(name) for name in shared})
        command(engine=engine, **given)

    declared: list[Parameter] = [*(one for name, one in own.items() if name != "engine"), *shared.values()]
    run.__signature__ = signature(command).replace(parameters=declared)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in declared}
    return run


@app.command()
def fit(
    traces: Annotated[list[Path], typer.Argument(help="Step traces, as MOTET_STEP_TRACE makes runners write them.")],
    output: Output,
) -> None:
    """Learn it from step traces of a runner, or of several alike."""
    from motet_cli.profile_commands import from_step_traces

    raise typer.Exit(from_step_traces(traces, output))


@app.command()
@_of_an_engine
def table(
    *,
    file: Annotated[Path, typer.Argument(help="The table of measurements that Splitwise's simulator comes with.")],
    output: Output,
    model: Annotated[str, typer.Option(help="Such as llama2-70b.")],
    hardware: Annotated[str, typer.Option(help="Such as h100-80gb.")],
    parallel: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="How many GPUs compute together.")] = 8,
    engine: "EngineSize",
) -> None:
    """Learn it from published measurements."""
    from motet_cli.profile_commands import from_table

    raise typer.Exit(from_table(file, output, model=model, hardware=hardware, parallel=parallel, engine=engine))


@app.command()
@_of_an_engine
def law(
    *,
    costs: Annotated[
        str, typer.Argument(help="Such as fixed=8ms,decode=0.2ms,context=0.1us,prefill=0.1ms,adapters=50us.")
    ],
    output: Output,
    machine: Annotated[str, typer.Option(help="Its name. Default: this machine's.")] = "",
    model: Annotated[str, typer.Option(help="The model's name.")] = "a model",
    engine: "EngineSize",
) -> None:
    """Take what you say: what an iteration costs, and each decode, token of context, prompt token and adapter in it."""
    from motet_cli.profile_commands import from_costs

    raise typer.Exit(from_costs(costs, output, machine=machine, model=model, engine=engine))


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A profile.")]) -> None:
    """Print what a profile says."""
    from motet_cli.profile_commands import show as run

    raise typer.Exit(run(file))
