"""`motet engine`: declares its commands. `engine_commands.py` carries them out."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="engine",
    help="Look at a model as a runner would, without starting anything.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def inspect(  # noqa: PLR0917 - typer calls it by name
    model: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors.")],
    adapters: Annotated[
        Path | None, typer.Option("--adapters", help="A folder of adapters, or one adapter as PEFT saves it.")
    ] = None,
    kv_cache_mib: Annotated[
        int | None, typer.Option("--kv-cache-mib", min=1, help="Memory for keys, values and adapters.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a usual prompt.")] = 160,
    output: Annotated[int, typer.Option(min=1, help="Tokens of a usual answer.")] = 340,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer that a client asks for.")] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Load a model and print its family, its memory, what each preset admits and what adapters cost."""
    from motet_cli.engine_commands import inspect as run

    raise typer.Exit(
        run(
            model,
            adapters=adapters,
            kv_cache_mib=kv_cache_mib,
            dtype=dtype,
            prompt=prompt,
            output=output,
            max_tokens=max_tokens,
            as_json=as_json,
        )
    )
