"""`motet predict`: declares its commands. `predict_commands.py` carries them out."""

from typing import Annotated

import typer

from motet_cli.options import DataDir
from motet_simulator.lines import MAX_TOKENS

app = typer.Typer(
    name="predict",
    help="Look at the versions of the length predictor, and choose the one that serves.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Versions are in the database at MOTET_DATABASE_URL, or else in the state directory.",
)

Version = Annotated[str, typer.Argument(metavar="VERSION", help="A name that `motet predict ls` shows.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def ls(data_dir: DataDir, as_json: AsJson = False) -> None:
    """List the versions that are kept: their role, and how good their estimates were."""
    from motet_cli.predict_commands import ls as run

    raise typer.Exit(run(data_dir, as_json=as_json))


@app.command()
def show(version: Version, data_dir: DataDir, as_json: AsJson = False) -> None:
    """Show all figures of a version."""
    from motet_cli.predict_commands import show as run

    raise typer.Exit(run(data_dir, version, as_json=as_json))


@app.command()
def promote(version: Version, data_dir: DataDir) -> None:
    """Let a version serve. The one that serves now stays in shadow, and serves again if answers show that it is the
    better one."""
    from motet_cli.predict_commands import promote as run

    raise typer.Exit(run(data_dir, version))


@app.command()
def rollback(data_dir: DataDir) -> None:
    """Let the version serve that served before."""
    from motet_cli.predict_commands import rollback as run

    raise typer.Exit(run(data_dir))


@app.command(name="try")
def try_(  # noqa: PLR0917 - typer calls it by name
    text: Annotated[str, typer.Argument(metavar="TEXT", help="What a user would say, as the first message of a chat.")],
    data_dir: DataDir,
    adapter: Annotated[
        str, typer.Option("--adapter", metavar="NAME", help="The model: an adapter's name, tenant/name, or a base.")
    ],
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAMESPACE", help="Who asks.")] = "default",
    max_tokens: Annotated[
        int, typer.Option(min=0, max=MAX_TOKENS, help="The longest answer; 0: as long as the model allows.")
    ] = 0,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="How the answer would be sampled.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Estimate the answer to a text, and name what moved the estimate. Only where the stack runs."""
    from motet_cli.predict_try import try_ as run

    raise typer.Exit(
        run(
            data_dir,
            text,
            adapter=adapter,
            tenant=tenant,
            max_tokens=max_tokens,
            temperature=temperature,
            as_json=as_json,
        )
    )
