"""`motet key`: declares its commands. `key_commands.py` carries them out."""

from typing import Annotated

import typer

from motet_cli.options import DataDir

app = typer.Typer(
    name="key",
    help="Make, list and end the API keys that tenants call the gateway with.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Keys are kept, hashed, in the database: MOTET_DATABASE_URL, or the state directory's own.",
)

Tenant = Annotated[str, typer.Option("--tenant", metavar="NAMESPACE", help="Whose key it is: the name of a namespace.")]
Scopes = Annotated[
    str,
    typer.Option(
        "--scopes",
        help="With commas between: user (call models), admin (load and unload the tenant's adapters), "
        "monitor (read /metrics, with the figures of all tenants).",
    ),
]
Expires = Annotated[
    str | None, typer.Option("--expires", metavar="TIME", help="It ends by itself after that: 90d, 12h, 30m.")
]
Id = Annotated[str, typer.Argument(metavar="ID", help="The 16 characters that `motet key ls` shows.")]

_TAKES_NOTHING = {"allow_extra_args": True, "ignore_unknown_options": False}
"""Typer accepts extra arguments, so that we refuse them ourselves. Typer's own error message would repeat the argument,
which may be a key."""


@app.command()
def create(data_dir: DataDir, tenant: Tenant, scopes: Scopes = "user", expires: Expires = None) -> None:
    """Make a key and print it, this once: the key alone on standard output, words about it on standard error."""
    from motet_cli.key_commands import create as run

    raise typer.Exit(run(data_dir, tenant=tenant, scopes=scopes, expires=expires))


@app.command()
def ls(data_dir: DataDir, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """List all keys, without their secrets: whose they are, how long they last, when they were last used."""
    from motet_cli.key_commands import ls as run

    raise typer.Exit(run(data_dir, as_json=as_json))


@app.command()
def revoke(id_: Id, data_dir: DataDir) -> None:
    """End a key now. Gateways refuse it within 5 seconds, and end what it has running."""
    from motet_cli.key_commands import revoke as run

    raise typer.Exit(run(data_dir, id_))


@app.command()
def rotate(
    id_: Id,
    data_dir: DataDir,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="TIME", help="The old key ends after that: 30m, 1h, 0s.")
    ] = "1h",
) -> None:
    """Make a second key of the same tenant and scopes, and let the old one end after a while.

    One that expires gets a successor that lasts as long as it was made for. A key has one successor: the one to
    rotate next.
    """
    from motet_cli.key_commands import rotate as run

    raise typer.Exit(run(data_dir, id_, overlap=overlap))


@app.command(name="hash", context_settings=_TAKES_NOTHING)
def hash_(context: typer.Context, tenant: Tenant, scopes: Scopes = "user", expires: Expires = None) -> None:
    """Read a key on standard input and print the line that a file of keys, such as a Secret, has for it.

    No database is asked and nothing is kept: whoever has only this line cannot call the gateway.
    """
    from motet_cli.key_commands import hash_ as run

    raise typer.Exit(run(tenant=tenant, scopes=scopes, expires=expires, arguments=context.args))
