"""`motet`: the command line. Each command has its own module. This module declares them and prints their errors."""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

from motet.imports import without_collections

with without_collections():
    import typer

    from motet.errors import SETUP_FAILED, MotetError, SetupError
    from motet_cli import adapter_app, engine_app, key_app, plan_app, predict_app, profile_app, workload_app
    from motet_cli.options import DataDir

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(
    name="motet",
    help="One base language model for many tenants, each with their own LoRA adapters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.add_typer(adapter_app.app)
app.add_typer(key_app.app)
app.add_typer(engine_app.app)
app.add_typer(predict_app.app)
app.add_typer(profile_app.app)
app.add_typer(workload_app.app)
app.command()(plan_app.plan)


@app.command()
def up(  # noqa: PLR0917 - typer calls it by name
    data_dir: DataDir,
    manifests: Annotated[
        Path | None,
        typer.Option(
            "--filename", "-f", help="A folder or file of manifests, which Motet watches. Default: the bundled model."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of the gateway; 0 takes a free one.")] = 8000,
    runners: Annotated[
        int | None, typer.Option(min=0, help="Runners per pool, instead of the number in the manifest.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background. Returns when everything is ready.")
    ] = False,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for everything to be ready.")] = 300.0,
) -> None:
    """Start the whole system and print how to use it. Ctrl-C stops everything."""
    from motet_cli.up import Options
    from motet_cli.up import up as run

    raise typer.Exit(
        run(
            Options(
                data_dir=data_dir, manifests=manifests, port=port, runners=runners, detach=detach, wait_seconds=wait
            )
        )
    )


@app.command()
def down(data_dir: DataDir) -> None:
    """Stop everything that runs with this state directory."""
    from motet_cli.down import down as run

    raise typer.Exit(run(data_dir))


@app.command()
def status(data_dir: DataDir, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what runs, and its state. Exit status 1 if nothing runs."""
    from motet_cli.status import status as run

    raise typer.Exit(run(data_dir, as_json=as_json))


@app.command()
def chat(  # noqa: PLR0917
    data_dir: DataDir,
    model: Annotated[str | None, typer.Argument(help="An adapter or the base model; /model NAME switches.")] = None,
    url: Annotated[
        str | None, typer.Option(help="The URL of a gateway. Default: the one of the state directory.")
    ] = None,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Send this message, print the answer, and end.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=10, help="0 always takes the likeliest token.")
    ] = None,
) -> None:
    """Talk to a model."""
    from motet_cli.chat import Conversation
    from motet_cli.chat import chat as run

    raise typer.Exit(
        run(
            data_dir,
            url=url,
            message=message,
            conversation=Conversation(model or "", max_tokens=max_tokens, temperature=temperature),
        )
    )


@app.command()
def why(
    request: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="The id of a completion, or of the header x-motet-request or x-request-id of its answer."
        ),
    ],
    data_dir: DataDir,
    url: Annotated[
        str | None, typer.Option(help="The URL of a gateway. Default: the one of the state directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain what happened to a request: what it waited for, where it ran, and where its time went."""
    from motet_cli.why import why as run

    raise typer.Exit(run(data_dir, request, url=url, as_json=as_json))


@app.command()
def replay(
    records: Annotated[
        list[Path],
        typer.Argument(help="Files that MOTET_SCHEDULER_RECORD and MOTET_SUPERVISOR_RECORD have made."),
    ],
) -> None:
    """Decide again what was recorded live. Exit status 1 if a decision is another one now."""
    from motet_cli.replay import replay as run

    raise typer.Exit(run(records))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as version_of

    typer.echo(f"motet {version_of('motet')}")


def main() -> None:
    try:
        app(standalone_mode=True)
    except SetupError as error:
        _print_error(error.message)
        sys.exit(SETUP_FAILED)
    except MotetError as error:
        _print_error(error.message)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        _drop_output()
        _print_error(f"cannot write {error.filename or 'the output'}: {error.strerror}. Free some space.")
        sys.exit(SETUP_FAILED)


def _drop_output() -> None:
    """What could not be written would fail once more at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_error(message: str) -> None:
    """It may repeat what a stranger's file says."""
    from motet_cli.printer import Printer  # takes a tenth of a second

    Printer(to_errors=True).whole_line(("motet: ", "bold red"), message)


if __name__ == "__main__":
    main()
