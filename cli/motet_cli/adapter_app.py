"""`motet adapter`: declares its commands. The modules `adapter_*` carry them out."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from motet.domain import MAX_LORA_RANK
from motet.errors import SetupError
from motet_cli.json_errors import error_in_json
from motet_cli.options import DataDir

app = typer.Typer(
    name="adapter",
    help="Check adapters before they are served, and see and change those of the local stack.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an adapter, as PEFT saves it.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="M",
        help="The base model: its folder, or the name by which the running local stack serves it. Default: the only "
        "one of that stack.",
    ),
]
Name = Annotated[str, typer.Argument(metavar="[NS/]NAME", help="The name of a LoRAAdapter.")]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", metavar="NS", help="Its namespace: the tenant. Default: default."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def named(name: str, namespace: str | None, field: str = "NAME") -> tuple[str, str]:
    """Namespace and name. `adapter ls` and clients write them together."""
    from motet_cli.pushed_adapters import name_of

    within, slash, own = name.rpartition("/")
    if not slash:
        return "default" if namespace is None else namespace, own
    if namespace not in (None, within):
        raise SetupError(f"{field} {name!r} and --namespace {namespace!r} name two namespaces. Remove one of them.")
    name_of(within, own, given_as=field, namespace_as=field)
    return within, own


@app.command()
def check(  # noqa: PLR0917 - typer calls it by name
    folder: Folder,
    data_dir: DataDir,
    model: Model = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, bfloat16, float16 or float32. Default: the pool's, else auto.")
    ] = None,
    max_lora_rank: Annotated[
        int | None,
        typer.Option(
            "--max-lora-rank", min=1, max=MAX_LORA_RANK, help="The highest rank. Default: the pool's, else 64."
        ),
    ] = None,
    proof: Annotated[
        bool, typer.Option("--proof/--no-proof", help="Load the base model, and see what its engine and PEFT compute.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Say whether a runner would serve an adapter, and if not, why and what to do. Exit status 1: it would not, or what
    it computes is not what PEFT computes."""
    from motet_cli.adapter_check import check as run

    with error_in_json(as_json=as_json):
        status = run(
            data_dir, folder, model=model, dtype=dtype, max_lora_rank=max_lora_rank, as_json=as_json, proves=proof
        )
    raise typer.Exit(status)


@app.command()
def record(
    folder: Folder,
    data_dir: DataDir,
    model: Model = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One prompt per line, at most 8. Default: some questions.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the base model: float32, bfloat16 or float16. A quantized one keeps its own.")
    ] = "float32",
) -> None:
    """Write what the adapter answers to a few prompts into its folder, where it was trained: transformers and PEFT
    answer. Whoever serves it compares that (`motet adapter check`)."""
    from motet_cli.adapter_record import record as run

    raise typer.Exit(run(data_dir, folder, model=model, prompts=prompts, dtype=dtype))


@app.command()
def ls(data_dir: DataDir, as_json: AsJson = False) -> None:
    """List the adapters of the local stack: their phase, digest and rank, and which runners have them."""
    from motet_cli.adapter_commands import ls as run

    with error_in_json("adapters", as_json=as_json):
        status = run(data_dir, as_json=as_json)
    raise typer.Exit(status)


@app.command()
def show(name: Name, data_dir: DataDir, namespace: Namespace = None, as_json: AsJson = False) -> None:
    """Show all about one adapter: its revision and source, warnings, and conditions with what to do."""
    from motet_cli.adapter_commands import show as run

    with error_in_json(as_json=as_json):
        space, own = named(name, namespace)
        status = run(data_dir, own, namespace=space, as_json=as_json)
    raise typer.Exit(status)


@app.command()
def push(  # noqa: PLR0917 - typer calls it by name
    folder: Folder,
    data_dir: DataDir,
    name: Annotated[
        str, typer.Option("--as", metavar="[NS/]NAME", help="The name of the LoRAAdapter: what clients ask for.")
    ],
    model: Model = None,
    namespace: Namespace = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="Send it to s3://BUCKET/PREFIX or oci://REGISTRY/REPOSITORY[:TAG], and print the manifest that "
            "serves it from there.",
        ),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="[NS/]GROUP",
            help="With --to: the group of pools in the manifest. Default: that of the local stack.",
        ),
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(metavar="SECRET", help="With --to: the Secret in the manifest, with which runners read it."),
    ] = None,
    below: Annotated[
        Path | None,
        typer.Option(metavar="ROOT", help="Refuse DIR, and links in it, if they lead out of this folder."),
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Refuse a name that is declared already.")] = False,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait until it is served or refused.")] = 120.0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait for that.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check an adapter, copy it into the state directory, and serve it. A name that was pushed before gets a new
    revision. Exit status 1: it is refused, or not served in time.

    With --to, send it elsewhere instead: credentials come from the environment. Exit status 2: it could not be sent."""
    with error_in_json("check", "pushed", as_json=as_json):
        for option, given in (("--below", below is not None), ("--new", new)):
            if to is not None and given:
                raise SetupError(f"{option} is for what the local stack serves. Remove it, or --to.")
        if to is None and (pool is not None or secret is not None):
            raise SetupError("--pool and --secret are for the manifest that --to prints. Remove them, or add --to.")
        space, own = named(name, namespace, "--as")
        if to is None:
            from motet_cli.adapter_push import push as serve

            run = partial(serve, below=below, new=new, wait_seconds=0.0 if no_wait else wait)
        else:
            from motet_cli.adapter_upload import upload

            run = partial(upload, to=to, pool=pool, secret=secret)
        status = run(data_dir, folder, name=own, namespace=space, model=model, as_json=as_json)
    raise typer.Exit(status)


@app.command()
def rollback(  # noqa: PLR0917 - typer calls it by name
    name: Name,
    data_dir: DataDir,
    to: Annotated[
        str | None,
        typer.Option(metavar="DIGEST", help="The digest of a revision, or its first digits. Default: the one before."),
    ] = None,
    namespace: Namespace = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait until it is served or refused.")] = 120.0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait for that.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve an earlier revision again, also if its source has lost the files while this machine still has them."""
    from motet_cli.adapter_rollback import rollback as run

    wait_seconds = 0.0 if no_wait else wait
    with error_in_json("check", "pushed", as_json=as_json):
        space, own = named(name, namespace)
        status = run(data_dir, own, namespace=space, to=to, wait_seconds=wait_seconds, as_json=as_json)
    raise typer.Exit(status)


@app.command()
def rm(
    name: Name,
    data_dir: DataDir,
    namespace: Namespace = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait until its name is gone.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Remove an adapter that was pushed, and its files if no other manifest names them."""
    from motet_cli.adapter_push import rm as run

    with error_in_json("removed", as_json=as_json):
        space, own = named(name, namespace)
        status = run(data_dir, own, namespace=space, wait_seconds=wait, as_json=as_json)
    raise typer.Exit(status)
