"""`motet key`: declares its commands. `key_commands.py` carries them out."""

from typing import Annotated

import typer

from motet.errors import SetupError
from motet.keys import MAX_KEY_LIMITS, KeyLimits
from motet_cli.options import DataDir

app = typer.Typer(
    name="key",
    help="Create, list, rotate and revoke the API keys of the gateway.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Motet stores only hashes of keys: in the database at MOTET_DATABASE_URL, or else in the state directory.",
)

Tenant = Annotated[str, typer.Option("--tenant", metavar="NAMESPACE", help="The tenant of the key: a namespace name.")]
Scopes = Annotated[
    str,
    typer.Option(
        "--scopes",
        help="Separated by commas: user (call models), admin (load and unload the tenant's adapters over HTTP, on a "
        "local stack), monitor (read /metrics, with the figures of all tenants).",
    ),
]
Expires = Annotated[
    str | None, typer.Option("--expires", metavar="TIME", help="The key expires after this time: 90d, 12h, 30m.")
]
NamespaceUid = Annotated[
    str,
    typer.Option(
        "--namespace-uid",
        metavar="UID",
        help="In a cluster: bind the key to this namespace, so that it does not serve a later one of the same name. "
        "`kubectl get namespace NAMESPACE -o jsonpath={.metadata.uid}` prints it.",
    ),
]
RequestsPerMinute = Annotated[
    int | None, typer.Option(min=1, max=MAX_KEY_LIMITS.requests_per_minute, help="More requests are refused, or wait.")
]
TokensPerMinute = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_KEY_LIMITS.tokens_per_minute, help="The same for tokens of prompts and answers."),
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, max=MAX_KEY_LIMITS.concurrency, help="More requests than these wait.")
]
"""Without these options a key may use what its tenant may."""
Id = Annotated[str, typer.Argument(metavar="ID", help="The 16 characters that `motet key ls` shows.")]

_TAKES_NOTHING = {"allow_extra_args": True, "ignore_unknown_options": False}
"""Typer accepts extra arguments, so that we refuse them ourselves. Typer's own error message would repeat the argument,
which may be a key."""


@app.command()
def create(
    data_dir: DataDir,
    tenant: Tenant,
    scopes: Scopes = "user",
    expires: Expires = None,
    *,
    namespace_uid: NamespaceUid = "",
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    concurrency: Concurrency = None,
) -> None:
    """Create a key and print it once: only the key on standard output, its details on standard error."""
    from motet_cli.key_commands import create as run

    limits = KeyLimits(requests_per_minute or 0, tokens_per_minute or 0, concurrency or 0)
    raise typer.Exit(
        run(data_dir, tenant=tenant, namespace_uid=namespace_uid, scopes=scopes, expires=expires, limits=limits)
    )


@app.command()
def ls(data_dir: DataDir, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List all keys without their secrets: tenant, scopes, expiry and last use."""
    from motet_cli.key_commands import ls as run

    raise typer.Exit(run(data_dir, as_json=as_json))


@app.command()
def revoke(
    data_dir: DataDir,
    id_: Annotated[str, typer.Argument(metavar="[ID]", help="The 16 characters that `motet key ls` shows.")] = "",
    tenant: Annotated[
        str, typer.Option("--tenant", metavar="NAMESPACE", help="Instead of ID: revoke all keys of this tenant.")
    ] = "",
) -> None:
    """Revoke a key, or all keys of a tenant. Within 5 seconds gateways refuse them and end their running requests."""
    from motet_cli.key_commands import revoke, revoke_all

    if bool(id_) == bool(tenant):
        raise SetupError("give either the ID of a key, or --tenant NAMESPACE for all keys of a tenant.")
    raise typer.Exit(revoke_all(data_dir, tenant) if tenant else revoke(data_dir, id_))


@app.command()
def rotate(
    id_: Id,
    data_dir: DataDir,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="TIME", help="The old key expires after this time: 30m, 1h, 0s.")
    ] = "1h",
) -> None:
    """Replace a key: make a new one with the same tenant, scopes and lifetime. The old key expires after --overlap.

    You can rotate a key only once. After that, rotate the new key.
    """
    from motet_cli.key_commands import rotate as run

    raise typer.Exit(run(data_dir, id_, overlap=overlap))


@app.command(name="hash", context_settings=_TAKES_NOTHING)
def hash_(
    context: typer.Context,
    tenant: Tenant,
    scopes: Scopes = "user",
    expires: Expires = None,
    *,
    namespace_uid: NamespaceUid = "",
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    concurrency: Concurrency = None,
) -> None:
    """Read a key from standard input and print its line for a file of keys, such as a Secret.

    The command uses no database and stores nothing. The line has only the key's hash: nobody can call the gateway
    with it.
    """
    from motet_cli.key_commands import hash_ as run

    limits = KeyLimits(requests_per_minute or 0, tokens_per_minute or 0, concurrency or 0)
    how = {"tenant": tenant, "namespace_uid": namespace_uid, "scopes": scopes}
    raise typer.Exit(run(**how, expires=expires, limits=limits, arguments=context.args))
