"""`motet profile`: declares its commands. `profile_commands.py` carries them out."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="profile",
    help="Say how long the iterations of a runner take, for `motet plan`.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Output = Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")]
KvTokens = Annotated[int, typer.Option("--kv-tokens", min=16, help="Tokens whose keys and values fit into memory.")]
MaxSequences = Annotated[int, typer.Option("--max-sequences", min=1, help="The most sequences in one iteration.")]
Slots = Annotated[int, typer.Option("--adapter-slots", min=1, help="The most adapters in device memory.")]
AdapterTokens = Annotated[
    int,
    typer.Option(
        "--adapter-tokens", min=1, help="An adapter of rank 16 takes as much memory as the KV of this many tokens."
    ),
]
MaxLength = Annotated[int, typer.Option("--max-model-length", min=1, help="Tokens of prompt and answer together.")]


@app.command()
def fit(
    traces: Annotated[list[Path], typer.Argument(help="Step traces, as MOTET_STEP_TRACE makes runners write them.")],
    output: Output,
) -> None:
    """Learn it from step traces of a runner, or of several alike."""
    from motet_cli.profile_commands import from_step_traces

    raise typer.Exit(from_step_traces(traces, output))


@app.command()
def table(  # noqa: PLR0917 - typer calls it by name
    file: Annotated[Path, typer.Argument(help="The table of measurements that Splitwise's simulator comes with.")],
    output: Output,
    model: Annotated[str, typer.Option(help="Such as llama2-70b.")],
    hardware: Annotated[str, typer.Option(help="Such as h100-80gb.")],
    kv_tokens: KvTokens,
    parallel: Annotated[int, typer.Option(min=1, help="How many GPUs compute together.")] = 8,
    max_sequences: MaxSequences = 64,
    max_model_length: MaxLength = 4096,
    adapter_slots: Slots = 16,
    adapter_tokens: AdapterTokens = 256,
) -> None:
    """Learn it from published measurements."""
    from motet_cli.profile_commands import from_table
    from motet_simulator.profiles.tables import engine_size

    raise typer.Exit(
        from_table(
            file,
            output,
            model=model,
            hardware=hardware,
            parallel=parallel,
            engine=engine_size(
                kv_tokens=kv_tokens,
                max_sequences=max_sequences,
                max_model_length=max_model_length,
                adapter_slots=adapter_slots,
                adapter_tokens=adapter_tokens,
            ),
        )
    )


@app.command()
def law(  # noqa: PLR0917 - typer calls it by name
    costs: Annotated[
        str, typer.Argument(help="Such as fixed=8ms,decode=0.2ms,context=0.1us,prefill=0.1ms,adapters=50us.")
    ],
    output: Output,
    kv_tokens: KvTokens,
    machine: Annotated[str, typer.Option(help="Its name. Default: this machine's.")] = "",
    model: Annotated[str, typer.Option(help="The model's name.")] = "a model",
    max_sequences: MaxSequences = 64,
    max_model_length: MaxLength = 4096,
    adapter_slots: Slots = 16,
    adapter_tokens: AdapterTokens = 256,
) -> None:
    """Take what you say: what an iteration costs, and each decode, token of context, prompt token and adapter in it."""
    from motet_cli.profile_commands import from_costs
    from motet_simulator.profiles.tables import engine_size

    raise typer.Exit(
        from_costs(
            costs,
            output,
            machine=machine,
            model=model,
            engine=engine_size(
                kv_tokens=kv_tokens,
                max_sequences=max_sequences,
                max_model_length=max_model_length,
                adapter_slots=adapter_slots,
                adapter_tokens=adapter_tokens,
            ),
        )
    )


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A profile.")]) -> None:
    """Print what a profile says."""
    from motet_cli.profile_commands import show as run

    raise typer.Exit(run(file))
